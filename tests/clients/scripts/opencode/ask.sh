opencode run "Where does the key of the pool car hang?"
