"""What Python, bash, Node and compilers expect of the guest. Prints the name of each check passed."""

import ctypes
import ctypes.util
import http.server
import multiprocessing
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import urllib.request
from multiprocessing import shared_memory

libc = ctypes.CDLL(None, use_errno=True)


def square(n):
    return n * n


def pool():
    with multiprocessing.Pool(4) as workers:
        assert workers.map(square, range(100)) == [n * n for n in range(100)]


def serve(family, address):
    class Server(http.server.ThreadingHTTPServer):
        address_family = family

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_):
            pass

    server = Server((address, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"[{address}]" if ":" in address else address
    url = f"http://{host}:{server.server_address[1]}/"
    assert urllib.request.urlopen(url, timeout=30).read() == b"hello"
    server.shutdown()


def http4():
    serve(socket.AF_INET, "127.0.0.1")


def http6():
    serve(socket.AF_INET6, "::1")


def terminal():
    pid, fd = pty.fork()
    if pid == 0:
        os.execvp("sh", ["sh", "-c", "tty && stty size"])
    text = b""
    while True:
        try:
            data = os.read(fd, 1024)
        except OSError:
            break
        if not data:
            break
        text += data
    assert os.waitpid(pid, 0)[1] == 0 and text.startswith(b"/dev/pts/"), text


def strace():
    out = subprocess.run(
        ["strace", "-f", "-e", "trace=execve", "sh", "-c", "/bin/true"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stderr.count("execve(") >= 2, out.stderr


def inotify():
    with tempfile.TemporaryDirectory() as folder:
        fd = libc.inotify_init1(os.O_CLOEXEC)
        assert fd >= 0
        assert libc.inotify_add_watch(fd, folder.encode(), 0x100) >= 0  # IN_CREATE
        open(os.path.join(folder, "seen"), "w").close()
        assert select.select([fd], [], [], 10)[0]
        assert b"seen" in os.read(fd, 4096)
        os.close(fd)


def unshare():
    out = subprocess.run(["unshare", "-r", "id", "-u"], capture_output=True, text=True)
    assert out.stdout == "0\n", (out.stdout, out.stderr)


def shm():
    block = shared_memory.SharedMemory(create=True, size=1 << 20)
    block.buf[:4] = b"data"
    again = shared_memory.SharedMemory(name=block.name)
    assert bytes(again.buf[:4]) == b"data"
    again.close()
    block.close()
    block.unlink()


class Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


def mqueue():
    name = b"/casulo-compat"
    fd = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    assert libc.mq_send(fd, b"message", 7, 1) == 0
    buffer = ctypes.create_string_buffer(8192)
    assert libc.mq_receive(fd, buffer, 8192, None) == 7 and buffer.raw[:7] == b"message"
    assert libc.mq_unlink(name) == 0


def timers():
    assert libc.syscall(283, 1, 0) >= 0  # timerfd_create
    assert os.memfd_create("compat") >= 0
    assert os.eventfd(0) >= 0
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.sigwait({signal.SIGALRM})


def compile_c():
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "a.c")
        with open(source, "w") as file:
            file.write('#include <stdio.h>\nint main(){puts("compiled");}\n')
        subprocess.run(["gcc", "-O1", "-o", os.path.join(folder, "a"), source], check=True)
        out = subprocess.run([os.path.join(folder, "a")], capture_output=True, text=True)
        assert out.stdout == "compiled\n"


def node_like():
    """What a JavaScript engine needs: big reservations, executable memory, epoll, UNIX sockets."""
    import mmap

    big = mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    big.close()
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8" + struct.pack("<I", 42) + b"\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 42
    epoll = select.epoll()
    left, right = socket.socketpair()
    epoll.register(left, select.EPOLLIN | select.EPOLLET)
    right.send(b"x")
    assert epoll.poll(10) == [(left.fileno(), select.EPOLLIN)]


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})

if __name__ == "__main__":
    for name, check in [
        ("pool", pool),
        ("http4", http4),
        ("http6", http6),
        ("pty", terminal),
        ("strace", strace),
        ("inotify", inotify),
        ("unshare", unshare),
        ("shm", shm),
        ("mqueue", mqueue),
        ("timers", timers),
        ("compile", compile_c),
        ("node-like", node_like),
    ]:
        check()
        print(name, flush=True)
