# Runs each source text that the agent names in one namespace, and answers with the value of its last
# expression. Descriptor argv[1] is the agent's; argv[2] is the folder with the texts.
def _casulo():
    import ast, json, linecache, os, sys, traceback, types

    control, folder = int(sys.argv[1]), sys.argv[2]
    sys.argv = [""]
    os.set_inheritable(control, False)
    os.environ.setdefault("MPLBACKEND", "Agg")
    me = os.getpid()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    lines = os.fdopen(control, "rb", closefd=False)

    def text(value):
        words = repr(value)
        if len(words) > 65536:
            words = words[:65536] + "..."
        return words.encode("utf-8", "backslashreplace").decode()

    def execute(call):
        for name, value in call["env"].items():
            os.environ[name] = value
        if call["cwd"]:
            os.chdir(call["cwd"])
        source = open(f"{folder}/code-{call['call']}", encoding="utf-8", newline="").read()
        name = f"<call {call['call']}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        tree = ast.parse(source, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        space = main.__dict__
        exec(compile(tree, name, "exec", dont_inherit=True), space)
        if last is not None:
            value = eval(compile(last, name, "eval", dont_inherit=True), space)
            if value is not None:
                space["_"] = value
                return text(value)
        return None

    def run(call):
        try:
            return 0, execute(call)
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return (end.code or 0) & 255, None
            print(end.code, file=sys.stderr)
        except BaseException as error:
            trace = error.__traceback__
            while trace and trace.tb_frame.f_code.co_filename == "<string>":
                trace = trace.tb_next
            traceback.print_exception(type(error), error, trace)
            if isinstance(error, KeyboardInterrupt):
                return 130, None
        return 1, None

    while True:
        line = lines.readline()
        if not line:
            return
        call = json.loads(line)
        stdin = os.open(f"{folder}/stdin-{call['call']}", os.O_RDONLY)
        os.dup2(stdin, 0)
        os.close(stdin)
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        status, result = run(call)
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            try:
                stream.flush()
            except Exception:
                pass
        if os.getpid() != me:
            os._exit(status)
        answer = {"call": call["call"], "exit": status, "result": result}
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(control, data):]


_casulo()
