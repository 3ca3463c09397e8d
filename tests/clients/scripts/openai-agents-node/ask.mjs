import { Agent, OpenAIChatCompletionsModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

setTracingDisabled(true);
const client = new OpenAI({
  baseURL: "http://127.0.0.1:8000/v1/collections/handbook",
  apiKey: "YOUR_KEY",
});
const daysOfLeave = tool({
  name: "days_of_leave",
  description: "Return the days of leave that a person has left.",
  parameters: z.object({ name: z.string() }),
  execute: async ({ name }) => name.length,
});
const agent = new Agent({
  name: "Handbook",
  model: new OpenAIChatCompletionsModel(client, "ragcache-reader"),
  tools: [daysOfLeave],
});
const question = "Where does the key of the pool car hang?";

console.log((await run(agent, question)).finalOutput);

const streamed = await run(agent, question, { stream: true });
for await (const piece of streamed.toTextStream()) {
  process.stdout.write(piece);
}
