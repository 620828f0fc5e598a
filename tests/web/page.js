// Runs every program that the server lists, once, and posts each one's outputs back.
"use strict";

const TYPES = { F32: ["float32", Float32Array], I64: ["int64", BigInt64Array] };

function decode(value) {
  const [type, Array] = TYPES[value.dtype];
  const bytes = Uint8Array.from(atob(value.data), (character) => character.charCodeAt(0));
  return new ort.Tensor(type, new Array(bytes.buffer), value.shape);
}

async function run(name) {
  const program = new Uint8Array(await (await fetch(`program/${name}`)).arrayBuffer());
  const inputs = await (await fetch(`inputs/${name}`)).json();
  const session = await ort.InferenceSession.create(program, { executionProviders: ["wasm"] });
  const feeds = Object.fromEntries(inputs.map((value) => [value.name, decode(value)]));
  const results = await session.run(feeds);
  return Object.fromEntries(
    Object.entries(results).map(([output, tensor]) => [output, Array.from(tensor.data, Number)]),
  );
}

async function main() {
  ort.env.wasm.numThreads = 1;
  for (const name of await (await fetch("names")).json()) {
    let answer;
    try {
      answer = { outputs: await run(name) };
    } catch (error) {
      answer = { error: String(error) };
    }
    await fetch(`result/${name}`, { method: "POST", body: JSON.stringify(answer) });
  }
  await fetch("done", { method: "POST", body: "" });
}

main();
