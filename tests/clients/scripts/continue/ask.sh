cn --config config.yaml --print "Where does the key of the pool car hang?"
