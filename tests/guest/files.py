"""What programs expect of files, in the current folder. Prints the name of each check that holds."""
import ctypes, errno, fcntl, mmap, os, sys, threading

libc = ctypes.CDLL(None, use_errno=True)
here = os.open('.', os.O_RDONLY)


def check(function):
    function()
    print(function.__name__, flush=True)


def refused(code, what, *arguments, **named):
    try:
        what(*arguments, **named)
    except OSError as error:
        assert error.errno == code, error
    else:
        raise AssertionError(f'{what} was not refused with {errno.errorcode[code]}')


@check
def mmap_shared():
    file = os.open('shared', os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 3 * 4096)
    one, two = mmap.mmap(file, 3 * 4096), mmap.mmap(file, 3 * 4096)
    one[5000:5005] = b'hello'
    assert two[5000:5005] == b'hello'
    assert os.pread(file, 5, 5000) == b'hello'
    os.pwrite(file, b'there', 9000)
    assert one[9000:9005] == b'there'
    one.flush()
    os.rename('shared', 'shared2')
    assert open('shared2', 'rb').read()[5000:5005] == b'hello'


@check
def mmap_private():
    file = os.open('private', os.O_RDWR | os.O_CREAT)
    os.write(file, b'x' * 4096)
    copy = mmap.mmap(file, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    copy[0:3] = b'own'
    assert os.pread(file, 3, 0) == b'xxx'


@check
def o_direct():
    try:
        file = os.open('direct', os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        assert error.errno == errno.EINVAL, error
        return
    page = mmap.mmap(-1, 8192)
    page.write(b'd' * 8192)
    assert os.pwritev(file, [page], 0) == 8192
    other = open('direct', 'rb').read()
    assert other == b'd' * 8192
    page[0:8192] = bytes(8192)
    assert os.preadv(file, [page], 0) == 8192 and page[0:8192] == b'd' * 8192


@check
def locks_flock():
    one = os.open('lock', os.O_RDWR | os.O_CREAT)
    two = os.open('lock', os.O_RDWR)
    fcntl.flock(one, fcntl.LOCK_EX)
    refused(errno.EWOULDBLOCK, fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(one, fcntl.LOCK_UN)
    fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)


@check
def locks_posix():
    file = os.open('lock', os.O_RDWR)
    fcntl.lockf(file, fcntl.LOCK_EX, 10, 0)
    child = os.fork()
    if child == 0:
        own = os.open('lock', os.O_RDWR)
        try:
            refused(errno.EAGAIN, fcntl.lockf, own, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 5)
            fcntl.lockf(own, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 10)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@check
def names_in_any_bytes():
    names = [bytes([c]) * 3 for c in range(1, 256) if c not in b'/'] + [b'n' * 255, b' ', b'-', b'\xff\xfe']
    os.mkdir('names')
    for name in names:
        os.close(os.open(b'names/' + name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    assert sorted(os.listdir(b'names')) == sorted(set(names))
    for name in set(names):
        os.unlink(b'names/' + name)
    refused(errno.ENAMETOOLONG, os.open, b'names/' + b'n' * 256, os.O_CREAT)


@check
def long_paths():
    os.mkdir('deep')
    top = os.open('deep', os.O_RDONLY)
    folder = top
    for _ in range(40):
        os.mkdir('p' * 200, dir_fd=folder)
        folder = os.open('p' * 200, os.O_RDONLY, dir_fd=folder)
    file = os.open('leaf', os.O_RDWR | os.O_CREAT, dir_fd=folder)
    os.write(file, b'far')
    assert os.stat('leaf', dir_fd=folder).st_size == 3
    # A path of its own that just fits, and one that does not.
    path = 'deep/' + '/'.join(['p' * 200] * 20)
    assert len(path) < 4096 and os.path.isdir(path)
    refused(errno.ENAMETOOLONG, os.stat, 'deep/' + '/'.join(['p' * 200] * 21))


@check
def appends_of_two_processes_do_not_mix():
    def write(letter):
        file = os.open('appended', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for _ in range(200):
            assert os.write(file, letter * 100) == 100
        os._exit(0)
    children = []
    for letter in (b'a', b'b'):
        child = os.fork()
        if child == 0:
            write(letter)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    data = open('appended', 'rb').read()
    assert len(data) == 40000
    assert all(data[n:n + 100] in (b'a' * 100, b'b' * 100) for n in range(0, 40000, 100))


@check
def holes():
    file = os.open('sparse', os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 64 << 20)
    os.pwrite(file, b'data', 32 << 20)
    assert os.lseek(file, 0, os.SEEK_DATA) == 32 << 20
    assert os.lseek(file, 0, os.SEEK_HOLE) == 0
    os.fsync(file)
    assert os.fstat(file).st_blocks * 512 < 1 << 20
    os.posix_fallocate(file, 64 << 20, 1 << 20)
    assert os.fstat(file).st_size == 65 << 20


@check
def copy_file_range():
    with open('from', 'wb') as file:
        file.write(bytes(range(256)) * 1024)
    source, target = os.open('from', os.O_RDONLY), os.open('to', os.O_RDWR | os.O_CREAT)
    left = 256 * 1024
    while left:
        left -= os.copy_file_range(source, target, left)
    assert open('to', 'rb').read() == open('from', 'rb').read()


@check
def rename_flags():
    def rename(old, new, flags):
        if libc.renameat2(here, old, here, new, flags) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    for name in ('one', 'two'):
        with open(name, 'w') as file:
            file.write(name)
    refused(errno.EEXIST, rename, b'one', b'two', 1)
    rename(b'one', b'two', 2)
    assert (open('one').read(), open('two').read()) == ('two', 'one')
    rename(b'one', b'three', 1)
    try:
        rename(b'two', b'four', 4)
        raise AssertionError('a whiteout was made')
    except OSError as error:
        assert error.errno in (errno.EINVAL, errno.EPERM), error


@check
def links():
    os.link('two', 'hard')
    assert os.stat('hard').st_nlink == 2 and os.path.samefile('two', 'hard')
    os.symlink('two', 'soft')
    assert os.readlink('soft') == 'two' and open('soft').read() == open('two').read()


@check
def unlinked_while_open():
    file = os.open('gone', os.O_RDWR | os.O_CREAT)
    os.write(file, b'still here')
    os.unlink('gone')
    assert os.pread(file, 100, 0) == b'still here' and os.fstat(file).st_nlink == 0
    os.pwrite(file, b'S', 0)
    assert os.pread(file, 5, 0) == b'Still'
    refused(errno.ENOENT, os.stat, 'gone')


@check
def times_and_modes():
    os.chmod('two', 0o640)
    os.utime('two', ns=(1_000_000_001, 2_000_000_002))
    stat = os.stat('two')
    assert (stat.st_mode & 0o7777, stat.st_atime_ns, stat.st_mtime_ns) == (0o640, 1_000_000_001, 2_000_000_002)
    assert stat.st_uid == os.getuid()
    assert os.statvfs('.').f_bsize > 0
    refused(errno.EPERM, os.mknod, 'node', 0o20666, os.makedev(1, 3))


@check
def many_open_files():
    files = []
    try:
        for n in range(2000):
            files.append(os.open(f'open{n}', os.O_RDWR | os.O_CREAT))
    except OSError as error:
        assert error.errno in (errno.ENFILE, errno.EMFILE), error
    assert len(files) >= 500, len(files)
    for file in files:
        os.close(file)
    for n in range(2000):
        try:
            os.unlink(f'open{n}')
        except FileNotFoundError:
            break


@check
def threads_in_one_folder():
    os.mkdir('many')
    def work(letter):
        for n in range(200):
            with open(f'many/{letter}{n}', 'w') as file:
                file.write(letter)
            os.rename(f'many/{letter}{n}', f'many/{letter.upper()}{n}')
    threads = [threading.Thread(target=work, args=(letter,)) for letter in 'abcd']
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(os.listdir('many')) == 800
    assert all(open(f'many/{entry}').read() == entry[0].lower() for entry in os.listdir('many'))
