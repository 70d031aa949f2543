// What the tests of the npm client have it do: node ollama_npm.cjs URL NAME
// prints what came back as JSON. NODE_PATH says where the package lies.
"use strict";
const { Ollama } = require("ollama");

const client = new Ollama({ host: process.argv[2] });
const hello = [{ role: "user", content: "Hello" }];
const question = { role: "user", content: "Weather in Oslo?" };
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Tells",
      parameters: { type: "object", properties: { city: { type: "string" } } },
    },
  },
];
const schema = {
  type: "object",
  properties: { mood: { enum: ["good", "bad"] } },
  required: ["mood"],
  additionalProperties: false,
};

const gather = async (stream) => {
  const parts = [];
  for await (const part of await stream) parts.push(part);
  return parts;
};

const failure = async (call) => {
  try {
    await call;
    return "no error";
  } catch (error) {
    return { name: error.name, message: error.message, status: error.status_code };
  }
};

const refusals = async (calls) => {
  const found = {};
  for (const [name, call] of Object.entries(calls)) found[name] = await failure(call());
  return found;
};

const endless = (extra) => ({
  model: "endless",
  messages: hello,
  options: { num_predict: -1, temperature: 0 },
  ...extra,
});

const jobs = {
  lists: async () => ({
    list: await client.list(),
    show: await client.show({ model: "talker:1b" }),
    ps: await client.ps(),
    version: await client.version(),
  }),
  generate: async () => ({
    whole: await client.generate({ model: "plain:1b", prompt: "Hello" }),
    parts: await gather(
      client.generate({ model: "plain:1b", prompt: "Hello", stream: true }),
    ),
    filled: await client.generate({
      model: "endless",
      prompt: "def f(",
      suffix: "return 1",
      options: { num_predict: 5 },
    }),
  }),
  chat: async () => ({
    whole: await client.chat({ model: "plain:1b", messages: hello }),
    parts: await gather(
      client.chat({ model: "plain:1b", messages: hello, stream: true }),
    ),
    shaped: await client.chat(
      endless({ format: schema, options: { temperature: 0 } }),
    ),
  }),
  tools: async () => {
    const asked = { model: "talker:1b", tools };
    const answer = await client.chat({ messages: [question], ...asked });
    const result = { role: "tool", tool_name: "get_weather", content: "snow" };
    return {
      answer,
      told: await client.chat({
        messages: [question, answer.message, result],
        ...asked,
      }),
      parts: await gather(
        client.chat({ messages: [question], stream: true, ...asked }),
      ),
    };
  },
  thinking: async () => ({
    whole: await client.chat({ model: "muser:1b", messages: hello, think: true }),
    parts: await gather(
      client.chat({ model: "muser:1b", messages: hello, think: "low", stream: true }),
    ),
    quiet: await client.chat({ model: "talker:1b", messages: hello, think: false }),
  }),
  embeddings: async () => ({
    one: await client.embed({ model: "encoder", input: "a b c" }),
    several: await client.embed({ model: "encoder", input: ["a", "1 2"] }),
    older: await client.embeddings({ model: "encoder", prompt: "a b c" }),
  }),
  refusals: () =>
    refusals({
      pull: () => client.pull({ model: "plain:1b" }),
      pullStream: () => gather(client.pull({ model: "plain:1b", stream: true })),
      push: () => client.push({ model: "plain:1b" }),
      create: () => client.create({ model: "new", from: "plain:1b" }),
      copy: () => client.copy({ source: "plain:1b", destination: "new" }),
      delete: () => client.delete({ model: "plain:1b" }),
    }),
  unknown: () =>
    refusals({
      show: () => client.show({ model: "nope" }),
      generate: () => client.generate({ model: "nope", prompt: "x" }),
      chat: () => client.chat({ model: "nope", messages: hello }),
      chatStream: () =>
        gather(client.chat({ model: "nope", messages: hello, stream: true })),
      embed: () => client.embed({ model: "nope", input: "x" }),
    }),
  abilities: () =>
    refusals({
      tools: () => client.chat({ model: "plain:1b", messages: hello, tools }),
      images: () =>
        client.generate({ model: "plain:1b", prompt: "x", images: [Buffer.from("x")] }),
      think: () => client.chat({ model: "plain:1b", messages: hello, think: true }),
    }),
  // the test kills the runner when it reads this line
  broken: async () => {
    const stream = await client.chat(endless({ stream: true }));
    return failure(
      (async () => {
        let isFirst = true;
        for await (const _part of stream) {
          if (isFirst) console.log("first");
          isFirst = false;
        }
      })(),
    );
  },
  abort: async () => {
    const stream = await client.chat(endless({ stream: true }));
    const aborted = await failure(
      (async () => {
        for await (const _part of stream) client.abort();
      })(),
    );
    const after = await client.chat(endless({ options: { num_predict: 2 } }));
    return { aborted, after };
  },
};

jobs[process.argv[3]]().then((found) => console.log(JSON.stringify(found)));
