"""Blocks that another stream uses and that are freed while a graph is captured: they wait for the capture's end.

Which of several blocks PyTorch completes first it leaves to chance, as long as nothing tells them apart. So at most one at
a time is used only during a capture, and the others wait for streams of their own.
"""

import torch

MIB = 1 << 20
streams = [torch.cuda.Stream() for _ in range(4)]
kept = []


def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def capture(inside):
    """Captures a graph in which `inside` runs; requests during the capture must not complete what waits."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = torch.ones(1000, device="cuda")
        inside()
        kept.append(work * 2)
    kept.append(graph)


def request():
    """The first request after a capture completes what can be; a second one finds the rest."""
    for mib in (3, 1, 5):
        kept.append(block(mib))
        torch.cuda.synchronize()


def forked(on):
    """What `on` does during a capture becomes part of it."""
    on.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(on):
        torch.ones(10, device="cuda")
    torch.cuda.current_stream().wait_stream(on)


# Used before the capture: an event after it, on each stream.
before = [block(4 + i) for i in range(3)]
for used, stream in zip(before, streams):
    used.record_stream(stream)
before[2].record_stream(streams[3])
capture(before.clear)
request()

# Nobody uses it, or only its own stream does: complete at once.
alone = [block(12)]
alone[0].record_stream(torch.cuda.current_stream())


def on_its_own():
    own = block(6)
    own.record_stream(torch.cuda.current_stream())
    del own
    alone.clear()


capture(on_its_own)
request()

# A side stream's: on that stream it is used by nobody else, on the default one it is.
for on in (streams[0], torch.cuda.default_stream()):
    with torch.cuda.stream(streams[0]):
        theirs = [block(14)]
    theirs[0].record_stream(on)
    capture(theirs.clear)
    request()

# Used before, freed after the capture: as ever.
late = block(7)
late.record_stream(streams[0])
capture(lambda: None)
del late
request()

# Used only during the capture: complete at the next request, without any event.
for size in (9, 11):
    only_inside = [block(size)]

    def use_inside(what=only_inside):
        forked(streams[1])
        what[0].record_stream(streams[1])
        what.clear()

    capture(use_inside)
    request()

# A block of the graph's own pool.
def born_inside():
    forked(streams[1])
    born = block(10)
    born.record_stream(streams[1])
    del born


capture(born_inside)
request()

# Both before and during it, on the same stream and on another.
for other in (streams[2], streams[3]):
    both = [block(13)]
    both[0].record_stream(streams[2])

    def use_again(what=both, stream=other):
        forked(stream)
        what[0].record_stream(stream)
        what.clear()

    capture(use_again)
    request()

# What is asked first after a capture may be to give everything back.
flushed = [block(50)]
flushed[0].record_stream(streams[0])
capture(flushed.clear)
torch.cuda.empty_cache()
request()

# It still waits at the end.
waits = [block(21)]
waits[0].record_stream(streams[0])
capture(waits.clear)
print("captured", sum(isinstance(k, torch.cuda.CUDAGraph) for k in kept), "graphs")
