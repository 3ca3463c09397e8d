export OPENAI_API_BASE_URL=http://127.0.0.1:8000/v1
export OPENAI_API_KEY=YOUR_KEY
export ENABLE_OLLAMA_API=False
export WEBUI_AUTH=False # one user, without a password
export TASK_MODEL_EXTERNAL=ragcache-reader # titles and tags take no search for documents
export OFFLINE_MODE=True # downloads no models: the service finds the documents
export DATA_DIR=$HOME/open-webui

exec open-webui serve --host 127.0.0.1 --port 8181
