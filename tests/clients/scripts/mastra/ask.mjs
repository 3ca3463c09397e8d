import { Agent } from "@mastra/core/agent";

const agent = new Agent({
  id: "handbook",
  name: "Handbook",
  instructions: "Answer from the handbook.",
  model: {
    id: "ragcache/ragcache-reader",
    url: "http://127.0.0.1:8000/v1/collections/handbook",
    apiKey: "YOUR_KEY",
  },
});
const question = "Where does the key of the pool car hang?";

console.log((await agent.generate(question)).text);

for await (const piece of (await agent.stream(question)).textStream) {
  process.stdout.write(piece);
}
