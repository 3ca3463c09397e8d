// What LibreChat's server does with the file: it checks it, lists the models, and runs an agent.
import { readFile } from "node:fs/promises";

import { HumanMessage } from "@langchain/core/messages";
import { GraphEvents, ModelEndHandler, Providers, Run } from "@librechat/agents";
import { load } from "js-yaml";
import { configSchema } from "librechat-data-provider";

const config = configSchema.strict().parse(load(await readFile("librechat.yaml", "utf8")));
const { apiKey, baseURL, models } = config.endpoints.custom[0];
const headers = { Authorization: `Bearer ${apiKey}` };
const { data } = await (await fetch(`${baseURL}/models`, { headers })).json();
const model = models.default[0];
console.log(data.some((each) => each.id === model) ? "listed" : "missing", model);

const run = await Run.create({
  runId: crypto.randomUUID(),
  graphConfig: {
    type: "standard",
    llmConfig: { provider: Providers.OPENAI, model, apiKey, configuration: { baseURL } },
  },
  customHandlers: {
    [GraphEvents.CHAT_MODEL_END]: new ModelEndHandler(),
    [GraphEvents.ON_MESSAGE_DELTA]: {
      handle: (_, { delta }) => process.stdout.write(delta.content[0].text),
    },
  },
  returnContent: true,
});
const question = new HumanMessage("Where does the key of the pool car hang?");
const thread = { configurable: { thread_id: run.id }, streamMode: "values", version: "v2" };
const content = await run.processStream({ messages: [question] }, { runId: run.id, ...thread });
console.log(`\n${content.map((part) => part.text).join("")}`);
