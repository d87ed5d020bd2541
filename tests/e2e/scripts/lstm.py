"""A two-layer bidirectional LSTM (the cuDNN path), a GRU, and the same with packed sequences."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, 64)
        self.lstm = nn.LSTM(64, 128, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(256, 17)

    def forward(self, ids):
        states, _ = self.lstm(self.embed(ids))
        return self.head(states)


net = Tagger().cuda()
optimizer = torch.optim.Adam(net.parameters())
for step in range(3):
    ids = torch.randint(0, 2000, (16, 40 + step)).cuda()
    tags = torch.randint(0, 17, ids.shape).cuda()
    loss = F.cross_entropy(net(ids).flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()

gru = nn.GRU(32, 64, batch_first=True).cuda()
packed = pack_padded_sequence(torch.randn(4, 20, 32, device="cuda"), [20, 15, 9, 3], batch_first=True)
output, hidden = gru(packed)
padded, lengths = pad_packed_sequence(output, batch_first=True)
padded.sum().backward()
print("trained", step + 1, "steps")
