"""A program inside a sandbox that holds what a benchmark asks it to hold, and can prove it.

It evaluates the lines it is sent and answers each with one line, so a state of any size is built,
changed and checked by short expressions:

    puppet = Puppet.start(sandbox)
    puppet.ask("grow(512)")           # 512 MB of anonymous memory, each page different
    puppet.ask("dirty(1000, 7)")      # write 7 into 1,000 of its pages
    puppet.expect("dirt(1000)", 7)    # raises Wrong unless it is in all of them

A REPL of its own kind, because a real one keeps what it was told and grows with it.
"""

from __future__ import annotations

from report import Wrong

from deltabox import Process, Sandbox

_PATIENCE = 150.0  # seconds for one answer; filling gigabytes takes many

PROGRAM = r"""
import fcntl, mmap, os, resource, subprocess, sys, zlib

PAGE = 4096
memory = None
number = 0          # what was told last

def tell(n):
    global number
    number = n
    return n

# -- memory

def grow(megabytes):
    global memory
    memory = mmap.mmap(-1, megabytes << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = os.urandom(1 << 20)
    for at in range(0, len(memory), len(block)):
        memory[at:at + len(block)] = block
    for at in range(8, len(memory), PAGE):
        memory[at:at + 8] = at.to_bytes(8, "little")
    return megabytes

def places(count):
    step = len(memory) // PAGE // count
    if not step:
        raise ValueError("so many pages are not there")
    return range(0, count * step * PAGE, step * PAGE)

def dirty(count, n):
    value = n.to_bytes(8, "little")
    for at in places(count) if count else ():
        memory[at:at + 8] = value
    return tell(n)

def dirt(count):
    found = {memory[at:at + 8] for at in places(count)} if count else {number.to_bytes(8, "little")}
    return int.from_bytes(found.pop(), "little") if len(found) == 1 else f"{len(found)} values"

def checksum():
    return zlib.crc32(memory)

# -- files

def write(count, n):
    block = n.to_bytes(8, "little") * (PAGE // 8)
    for i in range(count):
        fd = os.open(f"/bench/{i}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, block)
        os.close(fd)
    return tell(n)

def written(count):
    wanted = number.to_bytes(8, "little") * (PAGE // 8)
    for i in range(count):
        with open(f"/bench/{i}", "rb") as file:
            if file.read() != wanted:
                return f"/bench/{i} is another"
    return number

def bulk(megabytes):
    # really written: random, different in every block, so that nothing can share or skip it
    block = bytearray(os.urandom(1 << 20))
    for i in range(megabytes):
        if i % 1024 == 0:
            file = open(f"/bench/bulk-{i >> 10}", "wb", buffering=0)
        block[:8] = i.to_bytes(8, "little")
        file.write(block)
    return megabytes

def bulky(megabytes):
    for i in range(0, megabytes, 37):
        with open(f"/bench/bulk-{i >> 10}", "rb") as file:
            file.seek((i & 1023) << 20)
            if int.from_bytes(file.read(8), "little") != i:
                return f"MB {i} is another"
    return megabytes

# -- descriptors: files with an offset, pipes with something in them

files, pipes = [], []

def hold(count):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    while len(files) + 2 * len(pipes) < count:
        if count - len(files) - 2 * len(pipes) >= 3:
            pipes.append(os.pipe())
        files.append(os.open(f"/bench/held-{len(files) % 50}", os.O_RDWR | os.O_CREAT))
    return len(files) + 2 * len(pipes)

def turn(n):
    for fd in files:
        os.lseek(fd, n, os.SEEK_SET)
    for reading, writing in pipes:
        if number:
            os.read(reading, 100)
        os.write(writing, b"%d" % n)
    return tell(n)

def turned():
    for fd in files:
        if os.lseek(fd, 0, os.SEEK_CUR) != number:
            return f"descriptor {fd} stands elsewhere"
    for reading, writing in pipes:
        found = os.read(reading, 100)
        if found != b"%d" % number:
            return f"pipe {reading} holds {found}"
        os.write(writing, found)
    return number

# -- processes: half of them forks of this one, so at its own addresses, half of other programs

LINES = {
    "bash": ["bash", "-c", 'v=0; while read l; do [[ $l = s* ]] && v=${l#s}; echo $v; done'],
    "sh": ["sh", "-c", 'v=0; while read l; do case $l in s*) v=${l#s};; esac; echo $v; done'],
    "perl": ["perl", "-e", '$| = 1; $v = 0; while (<>) { $v = $1 if /^s(\\d+)/; print $v, $/ }'],
    "sed": ["sed", "-un", "s/^s//;t set;g;p;b;:set;h;p"],
}
members = []        # (write to it, read from it)

def child(reading, writing):
    own = bytearray(64 * PAGE)
    value = b"0"
    for line in os.fdopen(reading, "rb"):
        if line.startswith(b"s"):
            value = line[1:].strip()
            for at in range(0, len(own), PAGE):
                own[at:at + len(value)] = value
        os.write(writing, own[-PAGE:len(value) - PAGE] + b"\n")
    os._exit(0)

def family(total):
    for i in range((total + 1) // 2 - 1):
        (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
        if os.fork() == 0:
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in (their_in, their_out):
                    try:
                        os.close(int(name))
                    except OSError:
                        pass  # the one that listed them
            child(their_in, their_out)
        os.close(their_in)
        os.close(their_out)
        members.append((os.fdopen(our_out, "wb", buffering=0), os.fdopen(our_in, "rb")))
    programs = list(LINES.values())
    for i in range(total // 2):
        process = subprocess.Popen(programs[i % len(programs)], stdin=-1, stdout=-1, bufsize=0)
        members.append((process.stdin, os.fdopen(os.dup(process.stdout.fileno()), "rb")))
        processes.append(process)
    return len(members) + 1

processes = []

def all_say(line):
    for to, _ in members:
        to.write(line)
    return {answer.readline().strip() for _, answer in members}

def set_all(n):
    all_say(b"s%d\n" % n)
    return tell(n)

def get_all():
    said = all_say(b"g\n") or {b"%d" % number}
    return number if said == {b"%d" % number} else f"{number} here, {said} there"

for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Puppet:
    """The program, from outside."""

    def __init__(self, process: Process) -> None:
        self.process = process

    @classmethod
    def start(cls, sandbox: Sandbox) -> Puppet:
        sandbox.files.mkdir("/bench")
        return cls(sandbox.spawn(["python3", "-c", PROGRAM]))

    def of(self, copy: Sandbox) -> Puppet:
        """Its copy in another sandbox of the tree."""
        return Puppet(copy.counterpart(self.process))

    def tell(self, expression: str) -> None:
        self.process.stdin.write(expression + "\n")

    def hear(self) -> str:
        answer = self.process.stdout.readline(timeout=_PATIENCE)
        if not answer:
            raise Wrong(f"the program ended: {self.process.stderr.read_available()[-500:]}")
        return answer.strip()

    def ask(self, expression: str) -> str:
        self.tell(expression)
        return self.hear()

    def expect(self, expression: str, value: int | str) -> None:
        """Raises `Wrong` for any other answer."""
        answer = self.ask(expression)
        if answer != str(value):
            raise Wrong(f"{expression} is {answer}, not {value}")
