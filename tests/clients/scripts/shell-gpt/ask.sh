export API_BASE_URL=http://127.0.0.1:8000/v1/collections/handbook
export OPENAI_API_KEY=YOUR_KEY

sgpt --model ragcache-reader "Where does the key of the pool car hang?"
