"""What a process or thread carries besides memory and descriptors; one test for each row."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_TOOLS = """
def prctl(*a):
    r = libc.prctl(*[ctypes.c_ulong(x) if isinstance(x, int) else x for x in (*a, 0, 0, 0, 0)[:5]])
    return r if r >= 0 else -ctypes.get_errno()
def call(*a):
    r = libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in a])
    return r if r >= 0 else -ctypes.get_errno()
def fetch(option):
    n = ctypes.c_int()
    assert prctl(option, ctypes.addressof(n)) == 0
    return n.value
def read(name):
    return open('/proc/self/' + name).read()
def attr(tid=0):
    b = ctypes.create_string_buffer(56)
    assert call(315, tid, b, 56, 0) == 0
    return b.raw.hex()
def setattr_(policy, nice=0, flags=0, runtime=0):
    packed = struct.pack('IIQiIQQQII', 56, policy, flags, nice, 0, runtime, 0, 0, 0, 0)
    assert call(314, 0, packed, 0) == 0
class Worker(threading.Thread):
    '''A thread that evaluates what it is given.'''
    def __init__(self, setup):
        super().__init__(daemon=True)
        self.setup, self.ready, self.go, self.done = setup, *(threading.Semaphore(0) for _ in '123')
        self.start(); self.ready.acquire()
    def run(self):
        exec(self.setup, globals()); self.ready.release()
        while True:
            self.go.acquire()
            try: self.answer = eval(self.text, globals())
            except BaseException as e: self.answer = repr(e)
            self.done.release()
    def ask(self, text):
        self.text = text; self.go.release(); self.done.acquire(); return self.answer
def status():
    fields = {}
    for line in open('/proc/thread-self/status'):
        key, _, value = line.partition(':')
        if not key.startswith(('Vm', 'Rss', 'vol', 'nonvol', 'FDSize', 'Hugetlb')):
            fields[key] = value.strip()
    return fields
"""

# what is set, how it is seen, what changes it
_PROCESS = {
    "chroot": (
        "os.makedirs('/jail/x'); os.chroot('/jail'); os.chdir('/x'); prctl(4, 0)",
        "[os.getcwd(), sorted(os.listdir('/'))]",
        "os.mkdir('/more')",
    ),
    "a chroot with changed limits of its own": (
        "open('/proc/self/oom_score_adj', 'w').write('444'); os.makedirs('/jail');"
        "fd = os.open('/proc/self/oom_score_adj', os.O_RDONLY); os.close(fd);"
        "os.chroot('/jail'); x = 0",
        "[os.listdir('/'), x]",
        "x = 1",
    ),
    "subreaper": ("prctl(36, 1)", "fetch(37)", "prctl(36, 0)"),
    "death signal": ("prctl(1, 12)", "fetch(2)", "prctl(1, 0)"),
    "death signal of another user": (
        "os.setresuid(33, 33, 33); prctl(1, 12)",
        "[fetch(2), os.getuid()]",
        "prctl(1, 0)",
    ),
    "securebits": (
        "assert prctl(28, 1 << 2 | 1 << 3 | 1 << 5) == 0",
        "prctl(27)",
        "prctl(28, 1 << 2 | 1 << 3 | 1 << 5 | 1)",
    ),
    "keep capabilities": ("assert prctl(8, 1) == 0", "[prctl(7), prctl(27)]", "prctl(8, 0)"),
    "personality": (
        "libc.personality(0x0040000)",
        "libc.personality(0xffffffff)",
        "libc.personality(0)",
    ),
    "scheduling of batches": ("setattr_(3, 7)", "attr()", "os.nice(1)"),
    "idle scheduling": (
        "setattr_(5)",
        "[attr(), os.sched_getscheduler(0)]",
        "os.nice(2)",
    ),
    "reset on fork": ("setattr_(3, 1, flags=1)", "attr()", "os.nice(1)"),
    "a slice of its own": ("setattr_(0, runtime=7000000)", "attr()", "setattr_(0)"),
    "affinity": (
        "os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})",
        "sorted(os.sched_getaffinity(0))",
        "os.sched_setaffinity(0, {0})",
    ),
    "i/o priority": ("call(251, 1, 0, 2 << 13 | 6)", "call(252, 1, 0)", "call(251, 1, 0, 3 << 13)"),
    "oom score": (
        "open('/proc/self/oom_score_adj', 'w').write('321')",
        "read('oom_score_adj')",
        "open('/proc/self/oom_score_adj', 'w').write('322')",
    ),
    "dumpable": ("prctl(4, 0)", "prctl(3)", "prctl(4, 1)"),
    "no new privileges": ("prctl(38, 1); x = 1", "[prctl(39), x]", "x = 2"),
    "timer slack": ("prctl(29, 123456)", "prctl(30)", "prctl(29, 1)"),
    "core dump filter": (
        "open('/proc/self/coredump_filter', 'w').write('0x7')",
        "read('coredump_filter')",
        "open('/proc/self/coredump_filter', 'w').write('0x1')",
    ),
    "no huge pages": ("prctl(41, 1)", "[prctl(42), status()['THP_enabled']]", "prctl(41, 0)"),
    "limits": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200));"
        "resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 24));"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0));"
        "resource.setrlimit(resource.RLIMIT_NPROC, (5000, 5000));"
        "resource.setrlimit(resource.RLIMIT_CPU, (500000, 600000));"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 41))",
        "read('limits')",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 200))",
    ),
    "umask": (
        "os.umask(0o137)",
        "read('status').splitlines()[1]",
        "os.umask(0o022)",
    ),
    "names": ("prctl(15, b'renamed (x) y')", "read('comm')", "prctl(15, b'other')"),
    "machine check policy": ("prctl(33, 1, 1)", "prctl(34)", "prctl(33, 1, 0)"),
    "no gain of execution": (
        "assert prctl(65, 1) == 0; x = 1",
        "[prctl(66), x, call(9, 0, 4096, 7, 0x22, -1, 0)]",
        "x = 2",
    ),
    "membarrier": (
        "assert call(324, 16, 0, 0) == 0; x = 1",
        "[call(324, 8, 0, 0), call(324, 512, 0, 0), call(324, 32, 0, 0), x]",
        "x = 2; call(324, 64, 0, 0)",
    ),
    "policy of memory": (
        "assert call(238, 3, struct.pack('Q', 1), 8) == 0",
        "[call(239, m := ctypes.create_string_buffer(4), n := ctypes.create_string_buffer(128),"
        "1024, 0, 0), m.raw.hex(), n.raw.hex()]",
        "call(238, 0, 0, 0)",
    ),
    "login": (
        "open('/proc/self/loginuid', 'w').write('1000'); x = 1",
        "[read('loginuid'), x]",
        "x = 2",
    ),
    "speculation": (
        "prctl(53, 0, 4); prctl(53, 1, 4); prctl(53, 2, 2); x = 1",
        "[[prctl(52, n) for n in range(3)], x, status()['Speculation_Store_Bypass']]",
        "x = 2",
    ),
    "merging": (
        "assert prctl(67, 1) == 0; x = 1",
        # uw: the engine watches its writes
        "[prctl(68), read('smaps').split('[heap]')[1].split('VmFlags:')[1].splitlines()[0]"
        ".replace(' uw', ''), x]",
        "x = 2",
    ),
    "cpuid": (
        "x = call(158, 0x1012, 0)",
        "[call(158, 0x1011), x]",
        "x = 2",
    ),
}


@pytest.mark.parametrize("what", _PROCESS)
def test_of_a_process(sandbox: Sandbox, what: str) -> None:
    setup, report, change = _PROCESS[what]
    check(sandbox, setup=_TOOLS + setup, report=report, change=change, rollbacks=2, forks=1)


def test_of_each_thread(sandbox: Sandbox) -> None:
    """Two workers and the main thread, each with values of its own."""
    check(
        sandbox,
        setup=_TOOLS
        + """
first = Worker("prctl(15, b'first'); setattr_(3, 4); prctl(29, 777);"
    "call(251, 1, 0, 3 << 13); libc.personality(0x0040000); prctl(38, 1); prctl(1, 10);"
    "os.sched_setaffinity(0, {0}); prctl(33, 1, 1)")
second = Worker("prctl(15, b'second'); setattr_(5, 9, flags=1); call(251, 1, 0, 2 << 13 | 7)")
x = 0
SEEN = ("[attr(), prctl(30), fetch(25), call(252, 1, 0), libc.personality(0xffffffff), fetch(2),"
    "sorted(os.sched_getaffinity(0)), prctl(34), status(),"
    "open('/proc/thread-self/comm').read()]")
def everybody():
    return [x, eval(SEEN), first.ask(SEEN), second.ask(SEEN)]
""",
        report="everybody()",
        change="x += 1; first.ask('prctl(29, 1)')",
    )


_NO_COUNTER = r"""
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
static sigjmp_buf back;
static void caught(int number) { (void)number; siglongjmp(back, 1); }
int main(void)
{
        char line[64];
        signal(SIGSEGV, caught);
        prctl(PR_SET_TSC, PR_TSC_SIGSEGV);
        while (fgets(line, sizeof line, stdin)) {
                int mode = 0;
                prctl(PR_GET_TSC, &mode);
                if (sigsetjmp(back, 1)) {
                        printf("%d refused\n", mode);
                } else {
                        unsigned low, high;
                        __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
                        printf("%d allowed\n", mode);
                }
                fflush(stdout);
                if (line[0] == 'x')
                        prctl(PR_SET_TSC, PR_TSC_ENABLE);
        }
}
"""


def test_no_time_stamp_counter(sandbox: Sandbox) -> None:
    sandbox.files.write_text("/tsc.c", _NO_COUNTER)
    sandbox.run("gcc -O1 -o /tsc /tsc.c", check=True)
    program = sandbox.spawn(["/tsc"])

    def says(line: str) -> str:
        program.stdin.write(line + "\n")
        return program.stdout.readline(timeout=20)

    assert says("x") == "2 refused\n"
    assert says("") == "1 allowed\n"
    program.kill()
    program = sandbox.spawn(["/tsc"])
    assert says("") == "2 refused\n"
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        assert says("x") == "2 refused\n"
        assert says("") == "1 allowed\n"
        sandbox.rollback(checkpoint)


def test_limits_lower_than_what_is_taken(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
os.setresuid(33, 33, 33)
signal.pthread_sigmask(signal.SIG_BLOCK, [35])
workers = [Worker('pass') for _ in range(4)]
for n in range(5): os.kill(os.getpid(), 35)
files = [os.open('/dev/null', 0) for _ in range(20)]
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
resource.setrlimit(resource.RLIMIT_SIGPENDING, (2, 2))
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
x = 0
""",
        report="[[w.ask('x + 1') for w in workers], [resource.getrlimit(n) for n in range(16)],"
        "sorted(signal.sigpending()), os.stat(files[-1]).st_rdev, x]",
        change="x += 1",
        rollbacks=2,
    )


def test_the_slack_that_zero_stands_for(sandbox: Sandbox) -> None:
    """It comes from whoever made the task, and is asked for by a change that is undone."""
    check(
        sandbox,
        setup=_TOOLS
        + """
prctl(29, 60000)
r, w = os.pipe()
orders, order = os.pipe()
if os.fork() == 0:
    prctl(29, 1)
    worker = Worker("prctl(29, 2000)")
    def told():
        now = [prctl(30), worker.ask('prctl(30)')]
        prctl(29, 0); worker.ask('prctl(29, 0)')
        now += [prctl(30), worker.ask('prctl(30)')]
        prctl(29, 1); worker.ask('prctl(29, 2000)')
        return now
    while os.read(orders, 1):
        os.write(w, json.dumps(told()).encode())
x = 0
def report():
    os.write(order, b'x')
    seen = os.read(r, 100).decode()
    prctl(29, 0); mine = prctl(30); prctl(29, 60000)
    return [seen, mine, prctl(30), x]
""",
        report="report()",
        change="x += 1",
        rollbacks=3,
    )


_REFUSED = {
    "dispatches its system calls itself": "assert prctl(59, 1, 0, 1 << 46, 0) == 0",
    "has a local descriptor table": (
        "assert call(154, 1, struct.pack('IIII', 0, 0, 0xfffff, 0x51), 16) == 0"
    ),
    "has a net namespace of its own|a thread in a net namespace": (
        "w = Worker('libc.unshare(0x40000000)')"
    ),
    "a time namespace of its own for its children": "assert libc.unshare(0x80) == 0",
    "a pid namespace of its own for its children": "assert libc.unshare(0x20000000) == 0",
    "a nice value of its own": "open('/proc/self/autogroup', 'w').write('5')",
}


@pytest.mark.parametrize("what", _REFUSED)
def test_refused(sandbox: Sandbox, what: str) -> None:
    probe = Probe.start(sandbox)
    if "dispatches" in what:
        # the selector lets every call pass until it says otherwise
        probe.do(_TOOLS + "b = ctypes.create_string_buffer(1)")
        probe.do("assert prctl(59, 1, 0, 0, ctypes.addressof(b)) == 0")
    else:
        probe.do(_TOOLS + _REFUSED[what])
    with pytest.raises(UnsupportedState, match=what):
        sandbox.checkpoint()
    assert probe.ask("1 + 1") == 2
