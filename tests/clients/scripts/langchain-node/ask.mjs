import { ChatOpenAI } from "@langchain/openai";

const model = new ChatOpenAI({
  model: "ragcache-reader",
  apiKey: "YOUR_KEY",
  configuration: { baseURL: "http://127.0.0.1:8000/v1/collections/handbook" },
});
const question = "Where does the key of the pool car hang?";

const answer = await model.invoke(question);
console.log(answer.content, Object.keys(answer.response_metadata.usage.sources));

for await (const chunk of await model.stream(question)) {
  process.stdout.write(chunk.content);
}
