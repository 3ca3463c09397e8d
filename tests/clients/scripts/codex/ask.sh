export RAGCACHE_KEY=YOUR_KEY

codex exec --skip-git-repo-check "Where does the key of the pool car hang?"
