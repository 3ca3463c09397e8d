bash serve.sh > serve.log 2>&1 &
trap "kill $!" EXIT
curl --silent --retry 120 --retry-delay 1 --retry-connrefused http://127.0.0.1:8181/health/liveliness

for stream in false true; do
  curl http://127.0.0.1:8181/v1/chat/completions \
    --header "Authorization: Bearer sk-choose-a-long-one-7f3a91" --json '{
      "model": "handbook",
      "messages": [{"role": "user", "content": "Where does the key of the pool car hang?"}],
      "stream": '$stream'
    }'
done
