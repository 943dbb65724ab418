// The tools of the tasks: a file is read, a command is run.

import { execSync } from "node:child_process";
import { readFileSync } from "node:fs";

export const TASK = "Read note.txt, run a shell command, and tell the number.";

export const read = ({ path }) => readFileSync(path, "utf8");
export const shell = ({ command }) => execSync(command, { encoding: "utf8" });

const schema = (name) => ({
  type: "object",
  properties: { [name]: { type: "string" } },
  required: [name],
  additionalProperties: false,
});

export const READ = { name: "read", description: "Read a file.", parameters: schema("path"), run: read };
export const SHELL = { name: "shell", description: "Run a command.", parameters: schema("command"), run: shell };
export const TOOLS = [READ, SHELL];
