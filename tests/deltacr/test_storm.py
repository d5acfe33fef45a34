"""A busy workload, checkpointed at random instants and rolled back, ends as if undisturbed."""

from __future__ import annotations

import random
import threading
import time

import pytest

from deltabox import Sandbox

_WORK = r"""
cat > /root/a.c <<'X'
#include <stdio.h>
int main(){int s=0;for(int i=0;i<1000;i++)s+=i;printf("%d\n",s);return 0;}
X
for i in $(seq 1 ROUNDS); do
  gcc -O1 /root/a.c -o /root/a && /root/a | tr 0-9 a-j | cat
  python3 -c "import json,subprocess as s
ran = s.run(['sh', '-c', 'echo sub; ls /etc | wc -l'], capture_output=True, text=True)
print(json.dumps([ran.stdout, $i]))"
  seq 1 2000 | sort -r | head -3 | md5sum
  (sleep 0.01; echo bg$i) & wait
done
"""


def _storm(sandbox: Sandbox, *, rounds: int, rollbacks: int) -> None:
    work = _WORK.replace("ROUNDS", str(rounds))
    expected = sandbox.run(["bash", "-c", work]).stdout
    sandbox.run("rm -f /root/a*")
    random.seed(rollbacks)
    results: list[tuple[str, str, int]] = []

    def call() -> None:
        result = sandbox.run(["bash", "-c", work])
        results.append((result.stdout, result.stderr, result.exit_code))

    thread = threading.Thread(target=call)
    thread.start()
    done = 0
    while thread.is_alive() and done < rollbacks:
        time.sleep(random.random() * 0.1)
        if not thread.is_alive():
            break
        checkpoint = sandbox.checkpoint()
        time.sleep(random.random() * 0.1)
        if not thread.is_alive():
            break
        sandbox.rollback(checkpoint)
        checkpoint.delete()
        done += 1
    thread.join(120)
    assert results == [(expected, "", 0)]
    assert done >= min(rollbacks, rounds // 4)


def test_ten_random_instants(sandbox: Sandbox) -> None:
    _storm(sandbox, rounds=20, rollbacks=10)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_three_hundred_random_instants(sandbox: Sandbox) -> None:
    _storm(sandbox, rounds=400, rollbacks=300)
