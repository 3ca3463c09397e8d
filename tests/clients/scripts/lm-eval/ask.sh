export OPENAI_API_KEY=YOUR_KEY
service=http://127.0.0.1:8000

# Answers from the collection.
lm_eval run --model local-chat-completions --apply_chat_template --include_path . --tasks handbook \
  --model_args "model=ragcache-reader,base_url=$service/v1/collections/handbook/chat/completions"

# Log-likelihoods of given texts, without documents. The tokens are the service's own.
lm_eval run --model local-completions --include_path . --tasks choices \
  --model_args "model=ragcache-reader,base_url=$service/v1/completions,auth_token=$OPENAI_API_KEY"
