// The TypeScript clients of npm: node client_ts.mjs v1|legacy|auto|modern URL, or ... CASULO [ARGS...]
//
// v1 is @modelcontextprotocol/sdk, the others @modelcontextprotocol/client in that era. The packages are
// in NODE_PACKAGES, the token for a URL in CASULO_TOKEN. What it makes and prints is that of driver.py.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [era, target, ...args] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${process.env.NODE_PACKAGES}/package.json`));
const load = (name) => import(pathToFileURL(require.resolve(name)));

const v1 = era === "v1";
const { Client } = await load(
  v1 ? "@modelcontextprotocol/sdk/client/index.js" : "@modelcontextprotocol/client");
const headers = { Authorization: `Bearer ${process.env.CASULO_TOKEN}` };
let transport;
if (target.startsWith("http")) {
  const { StreamableHTTPClientTransport } = await load(
    v1 ? "@modelcontextprotocol/sdk/client/streamableHttp.js" : "@modelcontextprotocol/client");
  transport = new StreamableHTTPClientTransport(new URL(target), { requestInit: { headers } });
} else {
  const { StdioClientTransport } = await load(
    v1 ? "@modelcontextprotocol/sdk/client/stdio.js" : "@modelcontextprotocol/client/stdio");
  const env = process.env;
  transport = new StdioClientTransport({ command: target, args, env, stderr: "inherit" });
}
const negotiation = { legacy: {}, auto: { mode: "auto" }, modern: { mode: { pin: "2026-07-28" } } };
const options = v1 || era === "legacy" ? {} : { versionNegotiation: negotiation[era] };
const client = new Client({ name: "check", version: "1" }, options);
// The older SDK tells nobody but its transport.
let protocol;
if (v1) {
  const pass = transport.setProtocolVersion?.bind(transport);
  transport.setProtocolVersion = (version) => (protocol = version, pass?.(version));
}
await client.connect(transport);

const { tools } = await client.listTools();
if (!v1) protocol = client.getNegotiatedProtocolVersion();
const server = client.getServerVersion()?.name;
console.log(JSON.stringify({ server, protocol, tools: tools.map((tool) => tool.name) }));
let sandbox = "";
for (const step of JSON.parse(readFileSync(new URL("calls.json", import.meta.url)))) {
  const input = Object.fromEntries(Object.entries(step.arguments)
    .map(([name, value]) => [name, value === "$sandbox_id" ? sandbox : value]));
  const result = await client.callTool({ name: step.tool, arguments: input });
  const text = result.content[0].text;
  sandbox = JSON.parse(text).sandbox_id ?? sandbox;
  console.log(JSON.stringify({ structured: result.structuredContent ?? null, text, is_error: result.isError ?? false }));
}
await client.close();
