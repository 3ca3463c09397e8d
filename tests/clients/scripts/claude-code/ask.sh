export ANTHROPIC_BASE_URL=http://127.0.0.1:8000/v1/collections/handbook
export ANTHROPIC_AUTH_TOKEN=YOUR_KEY
export ANTHROPIC_MODEL=ragcache-reader ANTHROPIC_DEFAULT_HAIKU_MODEL=ragcache-reader
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1

claude --print "Where does the key of the pool car hang?"
