"""Python threads that allocate and free at the same time, hand tensors over, and use streams of their own."""

import queue
import random
import threading

import torch

handover = queue.Queue()
torch.empty(1, device="cuda")


def producer(seed):
    rng = random.Random(seed)
    stream = torch.cuda.Stream()
    own = []
    for _ in range(1_500):
        with torch.cuda.stream(stream):
            x = torch.empty(rng.randrange(1, 4 << 20), dtype=torch.uint8, device="cuda")
        if rng.random() < 0.3:
            x.record_stream(torch.cuda.default_stream())
            handover.put(x)
        else:
            own.append(x)
        del x
        while len(own) > 50:
            own.pop(rng.randrange(len(own)))
    handover.put(None)


producers = [threading.Thread(target=producer, args=(i,)) for i in range(4)]
for thread in producers:
    thread.start()
received = ended = 0
while ended < len(producers):
    item = handover.get()
    ended += item is None
    received += item is not None
    del item
for thread in producers:
    thread.join()
print("threads ended:", ended)
