import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({
  baseURL: "http://127.0.0.1:8000/v1/collections/handbook",
  apiKey: "YOUR_KEY",
});
const question = {
  model: "ragcache-reader",
  max_tokens: 256,
  messages: [{ role: "user", content: "Where does the key of the pool car hang?" }],
};

const message = await client.messages.create(question);
console.log(message.content[0].text, message.content[0].citations[0].source);

const stream = client.messages.stream(question);
stream.on("text", (text) => process.stdout.write(text));
await stream.finalMessage();
