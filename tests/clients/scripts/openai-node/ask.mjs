import OpenAI from "openai";

const client = new OpenAI({
  baseURL: "http://127.0.0.1:8000/v1/collections/handbook",
  apiKey: "YOUR_KEY",
});
const question = {
  model: "ragcache-reader",
  messages: [{ role: "user", content: "Where does the key of the pool car hang?" }],
};

const answer = await client.chat.completions.create(question);
console.log(answer.choices[0].message.content, answer.sources.map((each) => each.source.name));

for await (const chunk of await client.chat.completions.create({ ...question, stream: true })) {
  process.stdout.write(chunk.choices[0].delta.content ?? "");
}
