webui=http://127.0.0.1:8181
bash serve.sh > serve.log 2>&1 &
trap "kill $!" EXIT
curl --silent --retry 180 --retry-delay 1 --retry-connrefused $webui/health

token=$(curl --silent $webui/api/v1/auths/signin --json '{"email": "", "password": ""}' |
  python -c 'import json, sys; print(json.load(sys.stdin)["token"])')
for stream in false true; do
  curl --silent $webui/api/chat/completions --header "Authorization: Bearer $token" --json '{
    "model": "ragcache-reader/handbook",
    "messages": [{"role": "user", "content": "Where does the key of the pool car hang?"}],
    "stream": '$stream'
  }'
done
