import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const ragcache = createOpenAICompatible({
  name: "ragcache",
  baseURL: "http://127.0.0.1:8000/v1/collections/handbook",
  apiKey: "YOUR_KEY",
});
const question = {
  model: ragcache("ragcache-reader"),
  prompt: "Where does the key of the pool car hang?",
};

console.log((await generateText(question)).text);

for await (const piece of streamText(question).textStream) {
  process.stdout.write(piece);
}
