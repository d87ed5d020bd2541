"""Trains a small model in the loop of a library's trainer, with memtrace's callback; prints what its hooks saw, as JSON."""

import json
import sys
import warnings

import torch
from torch import nn

import memtrace

which, out = sys.argv[1:]
warnings.simplefilter("ignore")
torch.manual_seed(0)
torch.autograd.set_multithreading_enabled(False)
seen = []


class Net(nn.Module):
    """Says which label its inner module runs under."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 1)
        self.body.register_forward_hook(lambda *_: seen.append([memtrace.current_label(), self.training]))

    def loss(self, x):
        return self.head(self.body(x)).square().mean()


DATA = [torch.randn(64) for _ in range(12)]


def with_lightning():
    from lightning.pytorch import LightningModule, Trainer

    from memtrace.integrations.lightning import MemtraceCallback

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, number):
            return self.net.loss(batch)

        def validation_step(self, batch, number):
            self.net.loss(batch)

        def on_validation_epoch_start(self):
            if failing:
                raise ValueError("on purpose")

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    failing = []
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    trainer = Trainer(
        callbacks=[MemtraceCallback()], max_epochs=2, accelerator="cuda", devices=1, logger=False, default_root_dir=out,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader, loader)
    trainer.validate(module, loader, verbose=False)
    failing.append(True)
    try:
        trainer.validate(module, loader, verbose=False)
    except ValueError:
        return module
    raise AssertionError("it did not fail")


def with_transformers():
    from transformers import Trainer, TrainingArguments

    from memtrace.integrations.huggingface import MemtraceCallback

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return {"loss": self.net.loss(x)}

    arguments = TrainingArguments(
        output_dir=out, num_train_epochs=2, per_device_train_batch_size=4, per_device_eval_batch_size=4, report_to=[],
        disable_tqdm=True, save_strategy="no", eval_strategy="epoch", prediction_loss_only=True, remove_unused_columns=False,
    )  # fmt: skip
    data = [{"x": x} for x in DATA]
    model = Model()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=[MemtraceCallback()])
    trainer.train()
    return model


model = with_lightning() if which == "lightning" else with_transformers()
in_the_loop = list(seen)
model.cuda().net.loss(torch.zeros(2, 64, device="cuda"))
snapshot = memtrace.snapshot()
marks = [[mark["sort"], mark["name"], mark["number"]] for mark in snapshot["memtrace"]["marks"]]
labels = sorted({entry.get("user_metadata", "") for entry in snapshot["device_traces"][0]})
left = [name for name in vars(model) if name.endswith("_step")]
json.dump({"seen": in_the_loop, "after": seen[-1][0], "marks": marks, "labels": labels, "left": left}, sys.stdout)
