"""What makes copies of a running program dangerous, one test for each row of docs/hazards.md."""

from __future__ import annotations

from deltabox import Sandbox
from tests.probe import Probe

_WIPED = """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def mapped(kind, advice=0):
    at = libc.mmap(None, 16384, 3, kind | mmap.MAP_ANONYMOUS, -1, 0)
    assert at not in (None, 2 ** 64 - 1), os.strerror(ctypes.get_errno())
    if advice:
        assert libc.madvise(at, 16384, advice) == 0
    ctypes.memset(at, 0x5a, 16384)
    return at
def content(at):
    return sorted(set(ctypes.string_at(at, 16384)))
def flags(at):
    found = False
    for line in open('/proc/self/smaps'):
        if line.startswith('%x-' % at):
            found = True
        if found and line.startswith('VmFlags'):
            return sorted(set(line.split()[1:]) - {'sd'})
wiped = mapped(mmap.MAP_PRIVATE, 18)
droppable = mapped(8)
kept = mapped(mmap.MAP_PRIVATE)
both = [flags(wiped), flags(droppable)]
"""


def test_random_devices_differ(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do("file = open('/dev/urandom', 'rb', buffering=0)")
    checkpoint = sandbox.checkpoint()
    forks = sandbox.fork_many(3, at=checkpoint)
    look = "[os.getrandom(16).hex(), file.read(16).hex(), open('/dev/random', 'rb').read(16).hex()]"
    seen = [value for one in (probe, *map(probe.within, forks)) for value in one.ask(look)]
    for _ in range(2):
        sandbox.rollback(checkpoint)
        seen += probe.ask(look)
    assert len(set(seen)) == len(seen) == 18
    for fork in forks:
        fork.close()


def test_memory_to_be_wiped_on_fork_is_never_saved(sandbox: Sandbox) -> None:
    """And the mapping with its flag comes back, so that the next fork(2) wipes it, too."""
    probe = Probe.start(sandbox)
    probe.do(_WIPED)
    assert [("wf" in each, "dp" in each) for each in probe.ask("both")] == [
        (True, False),
        (True, True),
    ]
    checkpoint = sandbox.checkpoint()
    look = "[content(at) for at in (wiped, droppable, kept)]"
    assert probe.ask(look) == [[0x5A]] * 3, "the checkpoint itself wiped something"
    child = """
import select
pid = os.fork()
if not pid:
    os._exit(content(wiped) == content(droppable) == [0] and content(kept) == [0x5a])
forked = os.waitpid(pid, 0)[1]
"""
    for _ in range(2):
        sandbox.rollback(checkpoint)
        assert probe.ask(look) == [[0], [0], [0x5A]]
        assert probe.ask("[flags(wiped), flags(droppable)] == both")
        probe.do("ctypes.memset(wiped, 0x5a, 16384); ctypes.memset(droppable, 0x5a, 16384)")
        probe.do(child)
        assert probe.ask("os.waitstatus_to_exitcode(forked)") == 1
    with sandbox.fork(at=checkpoint) as fork, fork.fork() as grandchild:
        for one in (fork, grandchild):
            assert probe.within(one).ask(look) == [[0], [0], [0x5A]]
            assert probe.within(one).ask("[flags(wiped), flags(droppable)] == both")


_GENERATOR = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/random.h>

/* As BoringSSL and others do it: a generator whose state lives in ordinary memory, and a page that
 * is wiped in a child to tell that it must be seeded again. */
static struct { uint64_t key, count; } state;
static volatile uint64_t *alive;

static uint64_t next(void)
{
        if (!*alive) {
                getrandom(&state, sizeof state, 0);
                *alive = 1;
        }
        state.key ^= state.key << 13, state.key ^= state.key >> 7, state.key ^= state.key << 17;
        return state.key + state.count++;
}

int main(void)
{
        char line[16];
        alive = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (madvise((void *)alive, 4096, MADV_WIPEONFORK))
                return 1;
        while (fgets(line, sizeof line, stdin)) {
                printf("%016lx\n", next());
                fflush(stdout);
        }
}
"""


def test_a_generator_that_watches_for_forks_is_seeded_again(sandbox: Sandbox) -> None:
    sandbox.files.write_text("/tmp/generator.c", _GENERATOR)
    sandbox.run("gcc -O1 -o /tmp/generator /tmp/generator.c", check=True)
    generator = sandbox.spawn(["/tmp/generator"])

    def draw(where: Sandbox) -> str:
        copy = where.counterpart(generator)
        copy.stdin.write("\n")
        return copy.stdout.readline(timeout=10)

    seen = [draw(sandbox), draw(sandbox)]
    checkpoint = sandbox.checkpoint()
    seen.append(draw(sandbox))
    forks = sandbox.fork_many(3, at=checkpoint)
    seen += [draw(fork) for fork in forks for _ in range(2)]
    for _ in range(2):
        sandbox.rollback(checkpoint)
        seen += [draw(sandbox), draw(sandbox)]
    assert len(set(seen)) == len(seen) == 13
    for fork in forks:
        fork.close()


_VDSO_GETRANDOM = """
vdso = ctypes.CDLL('linux-vdso.so.1')
draw_into = vdso.__vdso_getrandom
draw_into.restype = ctypes.c_ssize_t
draw_into.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p,
                      ctypes.c_size_t]
wanted = ctypes.create_string_buffer(64)  # struct vgetrandom_opaque_params
assert draw_into(None, 0, 0, ctypes.addressof(wanted), 2 ** 64 - 1) == 0
size, prot, kind = struct.unpack_from('3I', wanted)
libc.mmap.restype = ctypes.c_void_p
state = libc.mmap(None, mmap.PAGESIZE, prot, kind, -1, 0)
assert state is not None and size <= mmap.PAGESIZE
def draw():
    out = ctypes.create_string_buffer(16)
    assert draw_into(ctypes.addressof(out), 16, 0, state, size) == 16
    return out.raw.hex()
first = draw()
"""


def test_the_generator_in_the_vdso_is_seeded_again(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_VDSO_GETRANDOM)
    seen = [probe.ask("first")]
    checkpoint = sandbox.checkpoint()
    forks = sandbox.fork_many(3, at=checkpoint)
    seen += [probe.within(fork).ask("draw()") for fork in forks]
    for _ in range(3):
        seen.append(probe.ask("draw()"))
        sandbox.rollback(checkpoint)
    assert len(set(seen)) == len(seen) == 7
    for fork in forks:
        fork.close()
