// Runs each source text that the agent names in this process, and answers with the value of its last
// expression. Descriptor argv[1] is the agent's; argv[2] is the folder with the texts.
"use strict";
{
  const fs = require("fs"), net = require("net"), readline = require("readline");
  const util = require("util"), vm = require("vm");
  const [, descriptor, folder] = process.argv;
  process.argv.length = 1;
  const control = new net.Socket({ fd: Number(descriptor) });
  globalThis.require = require("module").createRequire(process.cwd() + "/");
  globalThis.module = undefined;
  let status = 0;
  const complain = (error) => {
    status = 1;
    fs.writeSync(2, (error instanceof Error ? error.stack : util.inspect(error)) + "\n");
  };
  process.on("uncaughtException", complain);
  process.on("unhandledRejection", complain);
  const execute = async (call) => {
    Object.assign(process.env, call.env);
    if (call.cwd) process.chdir(call.cwd);
    const source = fs.readFileSync(`${folder}/code-${call.call}`, "utf8");
    const value = await vm.runInThisContext(source, { filename: `<call ${call.call}>` });
    if (value === undefined) return null;
    const words = util.inspect(value);
    return words.length > 65536 ? words.slice(0, 65536) + "..." : words;
  };
  readline.createInterface({ input: control }).on("line", async (line) => {
    const call = JSON.parse(line);
    const stdin = fs.createReadStream(`${folder}/stdin-${call.call}`);
    Object.defineProperty(process, "stdin", { value: stdin, configurable: true });
    status = 0;
    let result = null;
    try {
      result = await execute(call);
    } catch (error) {
      complain(error);
    }
    control.write(JSON.stringify({ call: call.call, exit: status, result }) + "\n");
  });
}
