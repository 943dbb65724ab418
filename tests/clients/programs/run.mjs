// Runs a program's cases: `node run.mjs PROGRAM` reads {clients, cases: {case: arguments}} as JSON, and writes what each returned or threw.
// It is copied beside the clients' node_modules, where imports find them.

import { readFileSync } from "node:fs";

const asked = JSON.parse(readFileSync(0, "utf8"));
console.log = console.error; // what clients print is no answer
const module = await import(`./${process.argv[2]}.mjs`);
const results = {};
for (const [name, given] of Object.entries(asked.cases)) {
  try {
    results[name] = { value: await module[name](given) };
  } catch (error) {
    results[name] = { error: `${error.stack} ${JSON.stringify(error, null, 1)}` };
  }
}
const version = (client) => JSON.parse(readFileSync(`node_modules/${client}/package.json`, "utf8")).version;
const versions = Object.fromEntries(asked.clients.map((client) => [client, version(client)]));
process.stdout.write(JSON.stringify({ versions, results }));
process.exit(0);
