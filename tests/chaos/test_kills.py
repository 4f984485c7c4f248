from __future__ import annotations
from tests.chaos.harness import KILLED, Run, until


def test_base(new_run):
    import time
    run = new_run()
    t=time.time()
    ps=[run.start(r) for r in range(3)]
    print("started", time.time()-t)
    print(run.end(*ps), time.time()-t)
    run.check(reported={0:1,1:1,2:1})
    print(time.time()-t)
    print(ps[0].text())

def test_base2(new_run):
    test_base(new_run)
