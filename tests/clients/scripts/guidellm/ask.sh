guidellm run \
  --backend kind=openai_http,target=http://127.0.0.1:8000,model=ragcache-reader/handbook,api_key=YOUR_KEY \
  --profile kind=concurrent,streams=2 --constraint kind=max_requests,count=8 \
  --data kind=json_file,path=questions.jsonl --output kind=json,path=report.json
