"""No room for a snapshot while it is written: one line, nothing half, the
program goes on."""

import subprocess

import hazard
import pytest
import support


@pytest.mark.parametrize("how", ["disk", "quota"])
def test_the_next_snapshot_is_written_when_there_is_room_again(how, programs, gpu, tmp_path):
    small, full = tmp_path / "small", tmp_path / "full"
    small.mkdir()
    full.touch()
    path = small / "now.pickle"
    preload = [support.LIBRARY, programs / "liblockfree.so"]
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path / "out"), "MEMTRACE_STACKS": "none"}
    command = [programs / "fills", path]
    if how == "disk":
        if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("mount namespaces need root")
        command.append(f"ls -A '{small}' > '{full}' && mount -o remount,size=64m '{small}'")
        # What is in there goes with the mount.
        script = f"mount -t tmpfs -o size=256k tmpfs '{small}'; \"$@\"; rc=$?; cp '{path}' '{full}.pickle'; exit $rc"
        command = ["unshare", "-m", "bash", "-c", script, "run", *command]
    else:
        preload.insert(0, programs / "libquota.so")
        env["QUOTA"] = str(full)
        listed = tmp_path / "listed"
        command.append(f"ls -A '{small}' > '{listed}'; mv '{listed}' '{listed}.txt'; mv '{full}' '{full}.gone'")
    env["LD_PRELOAD"] = ":".join(map(str, preload))
    done = support.must(support.execute(command, env=env, timeout=60), code=7)
    first, second = done.stdout.split()
    assert first != "0" and second == "0", done
    said = [line for line in done.stderr.splitlines() if "wrote " not in line]
    reason = "No space left on device" if how == "disk" else "quota"
    assert len(said) == 1 and str(path) in said[0] and reason.lower() in said[0].lower(), said
    left = full if how == "disk" else tmp_path / "listed.txt"
    assert left.read_text() == "", "a part was left"
    written = tmp_path / "full.pickle" if how == "disk" else path
    support.must(support.memtrace("check", written))
    assert len(hazard.driver_blocks(support.load(written))) == 20000
    assert len(support.files(tmp_path / "out")) == 1, "that of the end"
