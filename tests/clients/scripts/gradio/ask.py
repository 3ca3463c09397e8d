import gradio
from gradio_client import Client

page = gradio.load_chat(
    "http://127.0.0.1:8000/v1/collections/handbook",
    model="ragcache-reader",
    token="YOUR_KEY",
    file_types=None,
)
_, address, _ = page.launch(server_port=8181, prevent_thread_lock=True)
question = "Where does the key of the pool car hang?"

for answer in Client(address).submit(question, api_name="/open_api_stream"):
    print(answer)
