// The TypeScript clients of npm: node client_ts.mjs v1|legacy|auto|modern URL, or ... CASULO [ARGS...]
//
// v1 is @modelcontextprotocol/sdk, the others @modelcontextprotocol/client in that era. The packages are
// in NODE_PACKAGES, the token for a URL in CASULO_TOKEN.
import assert from "node:assert/strict";
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
await client.connect(transport);

const call = async (name, input) => {
  const result = await client.callTool({ name, arguments: input }, ...(v1 ? [undefined] : []));
  const text = JSON.parse(result.content[0].text);
  if (!result.isError) assert.deepEqual(text, result.structuredContent, "both forms hold the same");
  return { ...text, isError: result.isError ?? false };
};

const { tools } = await client.listTools();
assert.ok(tools.some((tool) => tool.name === "execute_code"));
let result = await call("execute_code", { language: "python", code: "print(6*7)" });
assert.equal(result.stdout, "42\n");
assert.equal(result.exit_code, 0);
result = await call("run_command", { command: "echo err >&2; exit 3" });
assert.deepEqual([result.stderr, result.exit_code, result.isError], ["err\n", 3, false]);
const { sandbox_id } = await call("create_sandbox", {});
await call("write_file", { sandbox_id, path: "a.txt", content: "héllo\n" });
result = await call("run_command", { sandbox_id, command: "cat a.txt" });
assert.equal(result.stdout, "héllo\n");
assert.equal((await call("destroy_sandbox", { sandbox_id })).destroyed, true);
result = await call("destroy_sandbox", { sandbox_id });
assert.deepEqual([result.class, result.isError], ["sandbox_not_found", true]);
result = await call("run_command", { command: "true", timeout_seconds: 601 });
assert.deepEqual([result.class, result.isError], ["invalid_argument", true]);
await client.close();
console.log("ok");
