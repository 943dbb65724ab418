// A server of the Model Context Protocol that speaks only the newest revision of the protocol: it keeps notes.
//
// `newest_notes.mjs` talks over its standard streams; `newest_notes.mjs PORT` over streamable HTTP.

import { createServer } from "node:http";

import { toNodeHandler } from "@modelcontextprotocol/node";
import { createMcpHandler, McpServer } from "@modelcontextprotocol/server";
import { serveStdio } from "@modelcontextprotocol/server/stdio";
import * as z from "zod";

const notes = [];
const text = (said) => ({ content: [{ type: "text", text: said }] });

function make() {
  const server = new McpServer({ name: "notes", version: "1" });
  // Over HTTP, a header has to repeat this argument.
  const note = z.object({ text: z.string().meta({ "x-mcp-header": "Note" }) });
  server.registerTool("add_note", { description: "Keep a note.", inputSchema: note }, ({ text: given }) => {
    if (!given) throw new Error("an empty note");
    return text(`${notes.push(given)} kept`);
  });
  const annotations = { readOnlyHint: true };
  server.registerTool("read_notes", { description: "Read all notes.", annotations, inputSchema: z.object({}) }, () =>
    text(JSON.stringify(notes)),
  );
  const pause = z.object({ seconds: z.number() });
  server.registerTool("wait", { description: "Wait for some seconds.", inputSchema: pause }, async ({ seconds }) => {
    await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
    return text("waited");
  });
  return server;
}

if (process.argv[2]) {
  createServer(toNodeHandler(createMcpHandler(make, { legacy: "reject" }))).listen(Number(process.argv[2]), "127.0.0.1");
} else {
  serveStdio(make, { legacy: "reject" });
}
