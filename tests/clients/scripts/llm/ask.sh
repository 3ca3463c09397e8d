cat >"$(dirname "$(llm logs path)")/extra-openai-models.yaml" <<END
- model_id: handbook
  model_name: ragcache-reader/handbook
  api_base: http://127.0.0.1:8000/v1
  api_key_name: ragcache
END
llm keys set ragcache --value YOUR_KEY

llm -m handbook --no-stream "Where does the key of the pool car hang?"

llm -m handbook "Where does the key of the pool car hang?"
