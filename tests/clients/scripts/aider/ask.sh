export OPENAI_API_BASE=http://127.0.0.1:8000/v1/collections/handbook
export OPENAI_API_KEY=YOUR_KEY
export LC_ALL=C LANG=C

aider --model openai/ragcache-reader --chat-mode ask --no-git \
  --no-show-model-warnings --no-show-release-notes --no-analytics \
  --message "Where does the key of the pool car hang?"
