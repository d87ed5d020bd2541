mod programs;

use serde_json::{Value, json};

use super::*;
use Origin::{Gap, Generated, Installed, Native, PyTorch, Standard, User};

fn frame(filename: &str, name: &str, line: u64) -> Frame {
    Frame { name: name.to_owned(), filename: filename.to_owned(), line }
}

/// Of these frames, each of which is a stack of its own.
fn places_of(about: &Value, frames: &[Frame]) -> Places {
    let stacks: Vec<Vec<u32>> = (0..frames.len() as u32).map(|i| vec![i]).collect();
    Places::from_key(Memtrace::read(about.clone()).as_deref(), Tables { frames, stacks: &stacks })
}

/// As in a file of PyTorch's own: nothing is known but the frames.
fn alone(filename: &str, name: &str) -> Origin {
    let frame = frame(filename, name, 12);
    places_of(&Value::Null, std::slice::from_ref(&frame)).origin(&frame)
}

#[track_caller]
fn all(origin: Origin, files: &[&str]) {
    for file in files {
        assert_eq!(alone(file, "f"), origin, "{file}");
    }
}

#[test]
fn a_users_file_may_be_called_anything_and_lie_anywhere() {
    all(
        User,
        &[
            "/home/me/train.py",
            "/home/me/bin/train",
            "30_bin_train",
            "/home/me/run.sh",
            "/home/me/torch.py",
            "/home/me/threading.py",
            "/home/me/proj/torch/optim/mine.py",
            "/home/me/torch/nn/modules/module.py",
            "/home/me/site-packages/train.py",
            "/home/me/lib/python3/train.py",
            "/home/me/lib/python3.11/train.py",
            "/home/me/lib/python3/threading.py",
            "/home/me/python3.11/threading.py",
            "/home/me/my-site-packages/a.py",
            "/home/me/my.egg/train.py",
            "/home/me/acme-1.0.egg",
            "/home/me/.venv/train.py",
            "/home/me/app.zip/acme/train.py",
            "/tmp/ipykernel_4711/123.py",
            "/home/me/notes.ipynb",
            "<ipython-input-3-0a1b2c>",
            "<string>",
            "<stdin>",
            "<python-input-0>",
            "</script><b>.py",
            "C:\\Users\\me\\train.py",
            "D:\\me\\lib\\train.py",
            "C:/Users/me/train.py",
            "\\\\server\\share\\train.py",
            "/home/me/a\\b.py",
            "/p:12",
            "/srv/тест/模型 файл.py",
        ],
    );
}

#[test]
fn installed_packages_are_known_by_where_an_interpreter_looks() {
    all(
        Installed,
        &[
            "/env/lib/python3.11/site-packages/acme/train.py",
            "/env/lib64/python3.13t/site-packages/acme/train.py",
            "/opt/conda/envs/x/lib/python3.10/site-packages/transformers/trainer.py",
            "/home/me/proj/.venv/lib/python3.11/site-packages/acme.py",
            "/home/me/site-packages/.venv/lib/python3.11/site-packages/acme.py",
            "/usr/lib/python3/dist-packages/numpy/core.py",
            "/usr/local/lib/python3.10/dist-packages/vllm/worker.py",
            "/home/me/.local/lib/python3.11/site-packages/acme/x.py",
            "/opt/pypy/lib/pypy3.10/site-packages/acme/x.py",
            "/Users/me/Library/Python/3.11/lib/python/site-packages/acme/x.py",
            "C:\\env\\Lib\\site-packages\\acme\\train.py",
            "c:\\env\\lib\\site-packages\\acme\\train.py",
            "c:\\env\\lib\\Site-Packages\\acme\\train.py",
            "\\\\server\\env\\Lib\\site-packages\\acme\\train.py",
            "/home/me/.cache/bazel/7/external/pip_acme/site-packages/acme/train.py",
            "/home/me/.pex/wheels/acme-1.0-py3-none-any.whl/acme/x.py",
            "/env/lib/python3.11/site-packages/acme-1.0-py3.11.egg/acme/x.py",
        ],
    );
    assert_eq!(package("/v/lib/python3.11/site-packages/acme/a/b.py"), Some("acme"));
    assert_eq!(package("/v/lib/python3.11/site-packages/six.py"), Some("six"));
    assert_eq!(package("C:\\v\\Lib\\site-packages\\acme\\a.py"), Some("acme"));
    assert_eq!(package("/home/me/site-packages/acme/a.py"), None);
}

#[test]
fn the_standard_library_is_known_by_its_modules_in_its_folder() {
    all(
        Standard,
        &[
            "/usr/lib/python3.11/threading.py",
            "/usr/lib/python3.11/concurrent/futures/thread.py",
            "/opt/conda/lib/python3.10/runpy.py",
            "/usr/lib64/python3.9/contextlib.py",
            "C:\\Python311\\Lib\\threading.py",
            "C:\\Users\\me\\anaconda3\\lib\\runpy.py",
            "C:\\app\\python311.zip\\runpy.py",
            "<frozen importlib._bootstrap>",
            "<frozen runpy>",
        ],
    );
}

#[test]
fn pytorch_is_where_its_functions_or_its_libraries_are() {
    assert_eq!(alone("/env/lib/python3.11/site-packages/torch/nn/functional.py", "f"), PyTorch);
    // A source tree, and an application that keeps no folders.
    for root in ["/home/me/pytorch/torch", "torch", "C:\\work\\pytorch\\torch"] {
        let slash = if root.contains('\\') { "\\" } else { "/" };
        let file = |part: &str| format!("{root}/{part}").replace('/', slash);
        let known = frame(&file("nn/modules/module.py"), "_call_impl", 1751);
        let other = frame(&file("optim/adamw.py"), "step", 5);
        let users = frame("/home/me/proj/torch/optim/mine.py", "step", 5);
        let frames = [known, other, users];
        let places = places_of(&Value::Null, &frames);
        assert_eq!(frames.each_ref().map(|f| places.origin(f)), [PyTorch, PyTorch, User], "{root}");
    }
    // Its libraries say it better than a copy of one of its functions.
    let library = frame("/opt/torch/lib/libtorch_cpu.so", "at::empty()", 70000);
    let copy = frame("/home/me/torch/nn/modules/module.py", "_call_impl", 5);
    let its = frame("/opt/torch/optim/adam.py", "step", 5);
    let frames = [library, copy, its];
    let places = places_of(&Value::Null, &frames);
    assert_eq!(frames.each_ref().map(|f| places.origin(f)), [Native, User, PyTorch]);
}

#[test]
fn what_the_process_had_loaded_counts_before_how_a_path_looks() {
    let loaded = [
        "/opt/py/bin/python3.11",
        "/opt/py/lib/python3.11/lib-dynload/_ctypes.cpython-311-x86_64-linux-gnu.so",
        "/deps/torch/lib/libc10.so",
    ];
    let python = Places::of_libraries(loaded.into_iter()).to_key();
    let python = serde_json::to_value(python).expect("JSON");
    assert_eq!(python, json!({"pytorch": ["/deps/torch"], "standard": ["/opt/py/lib/python3.11"]}));
    let frames = [
        frame("/deps/torch/optim/adam.py", "step", 3),
        frame("/opt/py/lib/python3.11/threading.py", "run", 3),
        frame("/home/me/lib/python3.11/threading.py", "run", 3),
        frame("/opt/app/server", "main", 12),
        frame("/opt/app/train", "main", 5000),
        frame("", "", 2),
        frame("??", "??", 2),
        frame("/opt/app/engine.plugin", "f", 2),
        frame("memtrace", "[no Python frames]", 0),
    ];
    let libraries = json!({"/opt/app/server": "", "/opt/app/engine.plugin": "ab"});
    let about = json!({"python": python, "libraries": libraries});
    let places = places_of(&about, &frames);
    assert_eq!(
        frames.each_ref().map(|f| places.origin(f)),
        [PyTorch, Standard, User, Native, User, User, Native, Native, Gap]
    );
    // A folder is known by whole parts, on Windows in large letters or small.
    let about = json!({"python": {"pytorch": ["/deps/torch", "C:\\Deps\\torch"]}});
    let frames = [
        frame("/deps/torch/optim/adam.py", "step", 3),
        frame("/deps/torch2/optim/adam.py", "step", 3),
        frame("/Deps/torch/optim/adam.py", "step", 3),
        frame("C:\\Deps\\torch\\optim\\adam.py", "step", 3),
        frame("c:\\deps\\TORCH\\optim\\adam.py", "step", 3),
    ];
    let places = places_of(&about, &frames);
    // Beside PyTorch are other packages.
    let origin = frames.each_ref().map(|f| places.origin(f));
    assert_eq!(origin, [PyTorch, Installed, User, PyTorch, PyTorch]);
    // What is no library of PyTorch's, or is elsewhere, says nothing.
    let others =
        ["/me/torch/lib/mine.so", "/me/build/lib/libtorch_cpu.so", "/me/torch/lib/torch.py"];
    assert_eq!(Places::of_libraries(others.into_iter()), Places::default());
    // Another name of the folder: how paths look must do.
    let about = json!({"python": {"standard": ["/elsewhere/lib/python3.11"]}});
    let places = places_of(&about, &frames);
    let looks = frame("/opt/py/lib/python3.11/threading.py", "run", 3);
    assert_eq!(places.origin(&looks), Standard);
    for (loaded, standard) in [
        ("/opt/py/bin/python3.12", "/opt/py/lib/python3.12"),
        ("/opt/py/lib/libpython3.12.so.1.0", "/opt/py/lib/python3.12"),
        ("/usr/lib/python3.13/lib-dynload/a.so", "/usr/lib/python3.13"),
    ] {
        assert_eq!(Places::of_libraries([loaded].into_iter()).standard, [standard]);
    }
}

#[test]
fn native_frames_are_known_without_a_list() {
    for (file, name) in [
        ("??", "??"),
        ("??", "main"),
        ("/usr/include/c++/12/functional", "std::invoke"),
        ("/usr/include/c++/12/functional", "operator()"),
        ("", "c10::cuda::f(int)"),
        ("", ""),
        ("/lib/x.so", "f"),
        ("/lib/libpython3.11.so.1.0", "Py_BytesMain"),
        ("RegisterCUDA_0.cpp", "f"),
        ("/usr/include/c++/12/functional", "std::function<void ()>::operator()"),
        ("thread48.o", "f"),
        ("C:\\torch\\lib\\c10_cuda.dll", "f"),
        ("/usr/bin/python3.11", "_start"),
        ("/build/core/src/lib.rs", "f"),
    ] {
        assert_eq!(alone(file, name), Native, "{file} {name}");
    }
    for line in [0, 70_000] {
        let server = frame("/opt/app/server", "main", line);
        assert_eq!(Places::default().origin(&server), Native, "an offset is no line: {line}");
        let typed = frame("<stdin>", "main", line);
        assert_eq!(Places::default().origin(&typed), User, "{line}");
    }
}

#[test]
fn what_a_compiler_wrote_is_nobodys() {
    let stem = format!("cab{}", "q".repeat(49));
    let own_folder = format!("/home/me/cache/ab/{stem}.py");
    all(
        Generated,
        &[
            "/tmp/torchinductor_me/ab/cabc.py",
            &own_folder,
            "<eval_with_key>.3",
            "<eval_with_key>.3 from /home/me/a.py:7 in forward",
            "<attrs generated init acme.Config>",
        ],
    );
    assert_eq!(alone("<string>", "__init__"), Generated);
    assert_eq!(alone("<string>", "<module>"), User);
    assert_eq!(alone("<string>", "<lambda>"), User);
    // A user's file that begins with a c is none.
    let other_folder = own_folder.replace("/ab/", "/xy/");
    let no_hash = own_folder.replace('q', "Q");
    all(User, &["/home/me/ab/cabc.py", "/home/me/cd/cabcdefg.py", &other_folder, &no_hash]);
}

fn stack(frames: &[(&str, &str, u64)]) -> Vec<Origin> {
    let frames: Vec<Frame> = frames.iter().map(|(f, n, l)| frame(f, n, *l)).collect();
    let stacks: [Vec<u32>; 1] = [(0..frames.len() as u32).collect()];
    let places = Places::from_key(None, Tables { frames: &frames, stacks: &stacks });
    places.stack(&frames.iter().collect::<Vec<_>>())
}

#[test]
fn what_only_starts_a_program_is_not_the_program() {
    let package = ("/env/lib/python3.11/site-packages/acme/cli.py", "main", 90);
    let command = ("/env/bin/acme", "<module>", 8);
    assert_eq!(stack(&[package, command]), [Installed, Generated]);
    let pipx = ("/home/me/.local/share/pipx/venvs/a/lib/python3.11/site-packages/a/c.py", "m", 9);
    assert_eq!(stack(&[pipx, ("/home/me/.local/bin/a", "<module>", 8)]), [Installed, Generated]);
    let windows = ("C:\\env\\Lib\\site-packages\\acme\\cli.py", "main", 90);
    let archive = ("C:\\env\\Scripts\\acme.exe\\__main__.py", "<module>", 7);
    assert_eq!(stack(&[windows, archive]), [Installed, Generated]);
    // The user's own script in a folder of that name.
    assert_eq!(stack(&[package, ("/home/me/bin/train", "<module>", 8)]), [Installed, User]);
    assert_eq!(stack(&[package, ("/env/bin/train", "<module>", 200)]), [Installed, User]);
    assert_eq!(stack(&[package, ("/env/bin/train", "helper", 8)]), [Installed, User]);
    let torch = ("/env/lib/python3.11/site-packages/torch/serialization.py", "load", 9);
    assert_eq!(stack(&[torch, ("/env/bin/train", "<module>", 2)]), [PyTorch, User]);

    let spawn = ("/usr/lib/python3.11/multiprocessing/spawn.py", "spawn_main", 122);
    let text = ("<string>", "<module>", 1);
    assert_eq!(stack(&[package, spawn, text]), [Installed, Standard, Generated]);
    assert_eq!(stack(&[package, text]), [Installed, User]);
    // Text that a user gave: to the standard library, or to a package with a folder of that name.
    assert_eq!(stack(&[("<frozen runpy>", "run_module", 226), text]), [Standard, User]);
    let theirs = ("/env/lib/python3.11/site-packages/acme/multiprocessing/pool.py", "map", 9);
    assert_eq!(stack(&[theirs, text]), [Installed, User]);
    // A package's own folder of that name holds no commands.
    let inner = ("/env/lib/python3.11/site-packages/acme/bin/train.py", "<module>", 3);
    assert_eq!(stack(&[package, inner]), [Installed, Installed]);
}

#[test]
fn a_file_is_named_without_its_folders() {
    for (file, name) in [
        ("/home/me/a.py", "a.py"),
        ("a.py", "a.py"),
        ("/home/me/a\\b.py", "a\\b.py"),
        ("C:\\me\\a.py", "a.py"),
        ("C:/me\\b/a.py", "a.py"),
    ] {
        assert_eq!(file_name(file), name);
    }
}
