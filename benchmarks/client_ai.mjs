// One thing that Vercel's AI SDK can be asked for, for other_clients.py:
//     node client_ai.mjs DIR URL MODEL API WHAT PICTURE
// DIR has the node_modules; API is one of the providers below, WHAT one of the scenarios. Writes one line of JSON.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const [dir, url, model, api, what, picture] = process.argv.slice(2);
const load = createRequire(dir + "/");
const { embed, generateText, jsonSchema, Output, stepCountIs, streamText, tool } = load("ai");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const { createOpenAI } = load("@ai-sdk/openai");
const { createAnthropic } = load("@ai-sdk/anthropic");

globalThis.AI_SDK_LOG_WARNINGS = false; // on stdout, which has to be one line of JSON
const base = { apiKey: "none", baseURL: url + "/v1" };
const compatible = createOpenAICompatible({ ...base, name: "spark", includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI(base);
const models = {
  compatible: () => compatible(model),
  chat: () => openai.chat(model),
  responses: () => openai.responses(model),
  anthropic: () => createAnthropic(base)(model),
};
const common = { model: models[api](), maxRetries: 0, maxOutputTokens: 2000 };
const form = {
  type: "object",
  properties: { answer: { type: "string", enum: ["done", "ready"] } },
  required: ["answer"],
  additionalProperties: false,
};
const look = tool({
  description: "Look somewhere.",
  inputSchema: jsonSchema({ type: "object", properties: { place: { type: "string" } }, required: ["place"] }),
  execute: async () => "nothing of note",
});

const scenarios = {
  prompt: async () => said(await generateText({ ...common, system: "Be brief.", prompt: "Say hello." })),
  stream: async () => {
    const made = streamText({ ...common, prompt: "Say hello.", onError: raise });
    let text = "";
    for await (const piece of made.textStream) text += piece;
    return said({ text, finishReason: await made.finishReason, usage: await made.usage });
  },
  tools: async () => {
    const stopWhen = stepCountIs(4);
    const made = streamText({ ...common, prompt: "Look.", tools: { look }, stopWhen, onError: raise });
    await made.consumeStream({ onError: raise });
    const steps = await made.steps;
    const results = steps.flatMap((step) => step.toolResults);
    if (!results.length) throw new Error("no tool was run");
    return said({ text: await made.text, finishReason: await made.finishReason, usage: await made.usage });
  },
  "picture and after": async () => await twoTurns({ openai: { store: false } }),
  // What it sends where nothing is said: references to items that the server has kept.
  references: async () => await twoTurns({}),
  "previous response": async () => {
    const first = await generateText({ ...common, prompt: "Say hello." });
    const previousResponseId = first.providerMetadata.openai.responseId;
    if (!previousResponseId) throw new Error("no id of a response");
    const next = await generateText({ ...common, prompt: "Again.", providerOptions: { openai: { previousResponseId } } });
    if (!(next.usage.inputTokens > first.usage.inputTokens)) throw new Error("what was before is not in the prompt");
    return said(next);
  },
  "not kept": async () => {
    // What was not kept is refused, and the message says what to set.
    const messages = [{ role: "user", content: "Say hello." }];
    const first = await generateText({ ...common, messages, providerOptions: { openai: { store: false } } });
    messages.push(...first.response.messages, { role: "user", content: "Again." });
    try {
      await generateText({ ...common, messages });
    } catch (error) {
      if (error.statusCode === 404 && error.message.includes("`store`: false")) return { refused: error.message };
      throw error;
    }
    throw new Error("references to what was not kept were taken");
  },
  "picture by tool": async () => {
    const data = readFileSync(picture).toString("base64");
    const shows = tool({
      ...look,
      toModelOutput: () => ({
        type: "content",
        value: [{ type: "text", text: "see" }, { type: "image-data", data, mediaType: "image/png" }],
      }),
    });
    return said(await generateText({ ...common, prompt: "Look.", tools: { look: shows }, stopWhen: stepCountIs(3) }));
  },
  form: async () => {
    const made = await generateText({ ...common, prompt: "Answer.", output: Output.object({ schema: jsonSchema(form) }) });
    if (!["done", "ready"].includes(made.output.answer)) throw new Error("not the form");
    return said(made);
  },
  reasoning: async () => {
    const thinking = { type: "enabled", budgetTokens: 1024 };
    const providerOptions = {
      openai: { reasoningEffort: "low", forceReasoning: true, store: false, include: ["reasoning.encrypted_content"] },
      spark: { reasoningEffort: "low" },
      anthropic: { thinking },
    };
    const messages = [{ role: "user", content: "Think." }];
    const first = await generateText({ ...common, messages, providerOptions });
    messages.push(...first.response.messages, { role: "user", content: "Again." });
    return said(await generateText({ ...common, messages, providerOptions }));
  },
  logprobs: async () => {
    const made = await generateText({ ...common, prompt: "Say hello.", providerOptions: { openai: { logprobs: 3 } } });
    const found = made.providerMetadata?.openai?.logprobs;
    if (!found?.length) throw new Error("no log-probabilities");
    return said(made);
  },
  embeddings: async () => {
    try {
      await embed({ model: compatible.embeddingModel(model), value: "hello", maxRetries: 0 });
    } catch (error) {
      if (error.statusCode === 404) return { refused: error.message };
      throw error;
    }
    throw new Error("embeddings were made");
  },
  cancelled: async () => {
    const controller = new AbortController();
    const made = streamText({ ...common, maxOutputTokens: 20000, prompt: "Count.", abortSignal: controller.signal });
    for await (const part of made.fullStream) if (part.type.endsWith("-delta")) controller.abort();
    return { cancelled: true };
  },
};

async function twoTurns(providerOptions) {
  const image = { type: "image", image: readFileSync(picture), mediaType: "image/png" };
  const messages = [{ role: "user", content: [{ type: "text", text: "What is this?" }, image] }];
  const first = await generateText({ ...common, messages, providerOptions });
  messages.push(...first.response.messages, { role: "user", content: "Sure?" });
  return said(await generateText({ ...common, messages, providerOptions }));
}

function raise({ error }) {
  console.error(error);
  process.exitCode = 1;
}

function said({ text, finishReason, usage }) {
  if (!(usage.inputTokens > 0 && usage.outputTokens > 0)) throw new Error("no usage: " + JSON.stringify(usage));
  if (!["stop", "length"].includes(finishReason)) throw new Error("ended with " + finishReason);
  return { chars: text.length, finishReason };
}

console.log(JSON.stringify(await scenarios[what]()));
