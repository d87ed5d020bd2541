//! Whole stacks of programs as they are installed and started: every frame has its owner beside it.

use super::*;
use memtrace_format::snapshot::NO_LINE;

/// A frame as `file:line function`, and whose it is.
type Row<'a> = (&'a str, Origin);

fn parse(text: &str) -> Frame {
    let at = text.find(' ').filter(|_| !text.starts_with('<'));
    let at = at.or_else(|| Some(text.find('>')? + text[text.find('>')?..].find(' ')?));
    let (place, name) = text.split_at(at.unwrap_or(text.len()));
    let (file, line) = place.rsplit_once(':').unwrap_or((place, "1"));
    frame(file, name.trim_start(), line.parse().unwrap_or(NO_LINE))
}

/// The frames of these stacks that are taken for somebody else's, innermost first.
fn wrong(about: &Value, stacks: &[&[Row<'_>]]) -> Vec<String> {
    let frames: Vec<Frame> = stacks.concat().iter().map(|(text, _)| parse(text)).collect();
    let mut first = 0;
    let of = |stack: &&[Row<'_>]| {
        let all: Vec<u32> = (first..first + stack.len() as u32).collect();
        first += stack.len() as u32;
        all
    };
    let numbers: Vec<Vec<u32>> = stacks.iter().map(of).collect();
    let places = Places::from_key(
        Memtrace::read(about.clone()).as_deref(),
        Tables { frames: &frames, stacks: &numbers },
    );
    let mut wrong = Vec::new();
    for (stack, numbers) in stacks.iter().zip(&numbers) {
        let frames: Vec<&Frame> = numbers.iter().map(|f| &frames[*f as usize]).collect();
        for ((text, right), is) in stack.iter().zip(places.stack(&frames)) {
            if is != *right {
                wrong.push(format!("{text}: {is:?}, not {right:?}"));
            }
        }
    }
    wrong
}

#[track_caller]
fn right(about: &Value, stacks: &[&[Row<'_>]]) {
    assert_eq!(wrong(about, stacks), Vec::<String>::new());
}

const NONE: Value = Value::Null;

#[test]
fn pytorch_may_run_from_another_path_than_its_libraries_real_one() {
    let linked: &[Row<'_>] = &[
        ("/data/pytorch/torch/lib/libtorch_cpu.so:70000 at::empty()", Native),
        ("/home/me/pytorch/torch/optim/adam.py:9 step", PyTorch),
        ("/home/me/pytorch/torch/nn/modules/module.py:9 _call_impl", PyTorch),
        ("/home/me/proj/train.py:9 <module>", User),
    ];
    right(&NONE, &[linked]);
    let key = |libraries: &[&str], places: Value| {
        let libraries: serde_json::Map<String, Value> =
            libraries.iter().map(|l| ((*l).to_owned(), json!(""))).collect();
        json!({"python": places, "libraries": libraries})
    };
    let about = key(
        &["/data/pytorch/torch/lib/libtorch_cpu.so"],
        json!({"pytorch": ["/data/pytorch/torch"]}),
    );
    right(&about, &[linked]);
    // Bazel's files for one program are links, too.
    right(
        &NONE,
        &[&[
            ("/c/7/external/pip_311_torch/site-packages/torch/lib/libc10.so:70000 f()", Native),
            ("/b/x.runfiles/pip_311_torch/site-packages/torch/cuda/graphs.py:9 f", PyTorch),
            ("/b/x.runfiles/pip_311_numpy/site-packages/numpy/core.py:9 f", Installed),
            ("/b/x.runfiles/_main/train.py:9 <module>", User),
        ]],
    );
    // An application in one file keeps no folders, and unpacks its libraries where there is room.
    for unpacked in ["/tmp/_MEIab12", "/opt/app/_internal"] {
        let library = format!("{unpacked}/torch/lib/libtorch_cpu.so");
        let native = format!("{library}:70000 at::empty()");
        let dynload = format!("{unpacked}/lib-dynload/_ctypes.so");
        let foreign = format!("{dynload}:70000 call");
        let stack: &[Row<'_>] = &[
            (&native, Native),
            (&foreign, Native),
            ("torch/cuda/graphs.py:9 f", PyTorch),
            ("contextlib.py:81 inner", Standard),
            ("acme/model.py:9 f", User),
            ("train.py:9 <module>", User),
        ];
        right(&NONE, &[stack]);
        let places = json!({"pytorch": [format!("{unpacked}/torch")], "standard": [unpacked]});
        right(&key(&[&library, &dynload], places), &[stack]);
    }
    // The standard library likewise: its own libraries are no Python.
    let linked: &[Row<'_>] = &[
        ("/data/py/lib/python3.11/lib-dynload/_ctypes.so:70000 call", Native),
        ("/home/py/lib/python3.11/contextlib.py:81 inner", Standard),
        ("/home/me/train.py:9 <module>", User),
    ];
    right(&NONE, &[linked]);
    let dynload = "/data/py/lib/python3.11/lib-dynload/_ctypes.so";
    right(&key(&[dynload], json!({"standard": ["/data/py/lib/python3.11"]})), &[linked]);
    let package = ("/data/py/lib/python3.11/site-packages/acme/x.py:9 f", Installed);
    right(&key(&[], json!({"standard": ["/data/py/lib/python3.11"]})), &[linked, &[package]]);
}

#[test]
fn a_users_own_folder_of_that_name_stays_his() {
    right(
        &json!({"python": {"pytorch": ["/opt/deps/torch"]}, "libraries": {}}),
        &[&[
            ("/opt/deps/torch/optim/adam.py:9 step", PyTorch),
            ("/home/me/torch/nn/modules/module.py:9 _call_impl", User),
            ("/home/me/train.py:9 <module>", User),
        ]],
    );
    right(
        &NONE,
        &[&[
            ("/x/torch/lib/libtorch_cpu.so:70000 at::empty()", Native),
            ("torch/optim/mine.py:9 step", User),
            ("/home/me/torch/cuda/mine.py:9 step", User),
            ("/home/me/train.py:9 <module>", User),
        ]],
    );
}

#[test]
fn packages_lie_in_many_kinds_of_folders() {
    all(
        Installed,
        &[
            "C:\\Users\\me\\AppData\\Roaming\\Python\\Python311\\site-packages\\acme\\x.py",
            "C:\\Users\\me\\AppData\\Local\\Packages\\PSF.3.11_q\\LocalCache\\local-packages\\Python311\\site-packages\\a\\x.py",
            "\\\\wsl$\\Ubuntu\\home\\me\\.venv\\lib\\python3.11\\site-packages\\acme\\x.py",
            "/home/me/.shiv/app_ab12/site-packages/acme/x.py",
            "/home/me/proj/__pypackages__/3.11/lib/acme/x.py",
            "/home/me/.cache/huggingface/modules/transformers_modules/org/m/modeling_m.py",
            "/data/hf/modules/datasets_modules/datasets/d/d.py",
            "/root/.cache/torch/hub/pytorch_vision_main/hubconf.py",
            "/nix/store/0a1b-python3.11-acme-1.0/lib/python3.11/site-packages/acme/x.py",
            "/tmp/ray/s/runtime_resources/pip/0a/virtualenv/lib/python3.11/site-packages/acme/x.py",
            "/home/me/.cache/uv/archive-v0/0a/lib/python3.11/site-packages/acme/x.py",
        ],
    );
    all(
        User,
        &[
            "/home/me/Python311/site-packages/x.py",
            "/home/me/shiv/app/site-packages/x.py",
            "/home/me/torch/hub/hubconf.py",
            "/home/me/huggingface/modules/train.py",
            "\\\\wsl$\\Ubuntu\\home\\me\\proj\\train.py",
            "\\\\wsl.localhost\\Ubuntu\\home\\me\\proj\\lib\\train.py",
            "/home/me/proj/src/acme/train.py",
            "/home/me/app.pyz/acme/train.py",
            "/tmp/ray/s/runtime_resources/working_dir_files/_ray_pkg_0a/train.py",
            "<cell line: 3>",
            "<timed exec>",
            "<torch_package_0>.acme/model.py",
        ],
    );
}

#[test]
fn the_folder_that_pytorch_lies_in_has_packages() {
    let target: &[Row<'_>] = &[
        ("/opt/deps/torch/nn/modules/module.py:9 _call_impl", PyTorch),
        ("/opt/deps/transformers/trainer.py:9 train", Installed),
        ("/home/me/train.py:9 main", User),
        ("/home/me/train.py:40 <module>", User),
    ];
    let command: &[Row<'_>] = &[
        ("/opt/deps/torch/nn/modules/module.py:9 _call_impl", PyTorch),
        ("/opt/deps/acme/cli.py:9 main", Installed),
        ("/opt/deps/bin/acme:8 <module>", Generated),
    ];
    // What is imported is no program, though it is a module.
    let imported: &[Row<'_>] = &[
        ("/opt/deps/torch/nn/modules/module.py:9 _call_impl", PyTorch),
        ("/opt/deps/acme/__init__.py:9 <module>", Installed),
        ("<frozen importlib._bootstrap>:241 _call_with_frames_removed", Standard),
        ("/home/me/train.py:2 <module>", User),
    ];
    right(&NONE, &[target, command, imported]);
    right(
        &NONE,
        &[&[
            ("C:\\deps\\torch\\nn\\modules\\module.py:9 _call_impl", PyTorch),
            ("C:\\deps\\acme\\cli.py:9 main", Installed),
            ("D:\\me\\train.py:9 <module>", User),
        ]],
    );
    // The program is there, beside PyTorch: under `python -m`, too, and below a thread's machinery.
    for script in ["/srv/app/train.py", "/srv/app/acme/deep/train.py"] {
        let module = format!("{script}:40 <module>");
        let in_thread: &[Row<'_>] = &[
            ("/srv/app/acme/data.py:9 load", User),
            ("/usr/lib/python3.11/threading.py:9 run", Standard),
        ];
        right(
            &NONE,
            &[
                &[
                    ("/srv/app/torch/nn/modules/module.py:9 _call_impl", PyTorch),
                    ("/srv/app/acme/model.py:9 forward", User),
                    (&module, User),
                    ("<frozen runpy>:88 _run_code", Standard),
                    ("/usr/bin/python3.11:70000 Py_RunMain", Native),
                ],
                in_thread,
            ],
        );
    }
    // Nobody's home is a folder of packages, and neither is a root.
    for home in ["/home/me", "/root", "/Users/me", "/var/home/me", ""] {
        let torch = format!("{home}/torch/nn/modules/module.py:9 _call_impl");
        let other = format!("{home}/acme/model.py:9 f");
        right(
            &NONE,
            &[&[(&torch, PyTorch), (&other, User), ("/tmp/ipykernel_1/2.py:1 <module>", User)]],
        );
    }
}

#[test]
fn a_commands_packages_may_lie_elsewhere() {
    for (called, script) in [
        ("/opt/pipx/venvs/acme/lib/python3.11/site-packages/acme/cli.py", "/usr/local/bin/acme"),
        ("/root/.local/share/uv/tools/a/lib/python3.11/site-packages/a/c.py", "/usr/local/bin/a-b"),
        ("/mnt/venv/lib/python3.11/site-packages/acme/cli.py", "/opt/venv/bin/acme"),
        ("/mnt/venv/lib/python3.11/site-packages/acme_x/cli.py", "/home/me/bin/acme-x"),
        (
            "C:\\t\\Lib\\site-packages\\acme\\cli.py",
            "C:\\Users\\me\\.local\\bin\\acme.exe\\__main__.py",
        ),
    ] {
        let (called, line) = (format!("{called}:90 main"), format!("{script}:8 <module>"));
        right(&NONE, &[&[(&called, Installed), (&line, Generated)]]);
    }
    let package = "/env/lib/python3.11/site-packages/acme/cli.py:90 main";
    for users in [
        "/home/me/bin/train:8 <module>",
        "/root/bin/train:8 <module>",
        "/var/home/me/bin/train:8 <module>",
        "/usr/local/bin/train:40 <module>",
        "/usr/local/bin/train:8 main",
        "/usr/local/bin/train.py:8 <module>",
        "/srv/proj/train:8 <module>",
        "/usr/local/bin/train:-1 <module>",
    ] {
        right(&NONE, &[&[(package, Installed), (users, User)]]);
    }
    // A script that makes an object of a class, and one that calls from several
    // lines, or beyond those of a command.
    let class = "/env/lib/python3.11/site-packages/acme/cli.py:90 __init__";
    right(&NONE, &[&[(class, Installed), ("/usr/local/bin/train:3 <module>", User)]]);
    for other in [4, 40] {
        let other = format!("/usr/local/bin/train:{other} <module>");
        let native = ("/lib/libpython3.11.so:70000 _PyEval_Vector", Native);
        right(
            &NONE,
            &[
                &[(package, Installed), ("/usr/local/bin/train:3 <module>", User)],
                &[(package, Installed), native, (&other, User)],
            ],
        );
    }
    // It calls the user's code, which is what counts.
    right(
        &NONE,
        &[&[("/home/me/src/acme/cli.py:9 main", User), ("/usr/local/bin/acme:8 <module>", User)]],
    );
    // Memory that its import takes.
    right(
        &NONE,
        &[
            &[
                ("/env/lib/python3.11/site-packages/acme/__init__.py:9 <module>", Installed),
                ("<frozen importlib._bootstrap>:241 _call_with_frames_removed", Standard),
                ("/usr/local/bin/acme:5 <module>", Generated),
            ],
            &[(package, Installed), ("/usr/local/bin/acme:8 <module>", Generated)],
        ],
    );
    let torch = "/env/lib/python3.11/site-packages/torch/distributed/run.py:900 main";
    right(&NONE, &[&[(torch, PyTorch), ("/env/bin/torchrun:8 <module>", Generated)]]);
}

#[test]
fn what_other_tools_start_programs_with_is_not_the_program() {
    let package = ("/env/lib/python3.11/site-packages/acme/train.py:90 main", Installed);
    for stack in [
        &[
            "/home/me/.vscode/extensions/ms-python.debugpy-1/bundled/libs/debugpy/_vendored/pydevd/pydevd.py:9 run",
            "/home/me/.vscode/extensions/ms-python.debugpy-1/bundled/libs/debugpy/__main__.py:39 <module>",
        ][..],
        &["/home/me/pycharm/plugins/python/helpers/pydev/pydevd.py:1500 _exec"],
        &["/home/me/.pex/unzipped_pexes/0a/.bootstrap/pex/pex.py:600 execute"],
        &["/home/me/.pex/venvs/0a/1b/__main__.py:260 <module>"],
        &[
            "/home/me/app/_bootstrap/__init__.py:253 bootstrap",
            "/home/me/app/__main__.py:3 <module>",
        ],
    ] {
        let mut rows = vec![package];
        rows.extend(stack.iter().map(|text| (*text, Generated)));
        right(&NONE, &[&rows]);
    }
    // Around a function that memtrace watches.
    for ours in ["/env/lib/python3.11/site-packages/memtrace", "/home/me/src/python/memtrace"] {
        let ours = format!("{ours}/tracer/plugins/distributed.py:83 wrapper");
        right(&NONE, &[&[(&ours, Generated), package]]);
    }
    for file in ["multiprocess/spawn.py", "billiard/spawn.py"] {
        let spawn = format!("/env/lib/python3.11/site-packages/{file}:122 spawn_main");
        right(&NONE, &[&[(&spawn, Installed), ("<string>:1 <module>", Generated)]]);
    }
    // A user's own debugger, and his own main module and its beginning.
    right(&NONE, &[&[package, ("/home/me/proj/_bootstrap/__init__.py:9 train", User)]]);
    right(
        &NONE,
        &[&[
            package,
            ("/home/me/debugpy/train.py:9 f", User),
            ("/home/me/app/__main__.py:3 <module>", User),
        ]],
    );
}

#[test]
fn a_program_may_be_a_text() {
    let text: &[Row<'_>] = &[("<string>:3 __init__", User), ("<string>:9 <module>", User)];
    let in_thread: &[Row<'_>] =
        &[("<string>:5 __call__", User), ("/usr/lib/python3.11/threading.py:9 run", Standard)];
    right(&NONE, &[text, in_thread]);
    let executed: &[Row<'_>] = &[
        ("<string>:3 __call__", User),
        ("<string>:9 <module>", User),
        ("/me/run.py:7 <module>", User),
    ];
    right(&NONE, &[executed]);
    // A data class's method beside the text of a new process, or one that a package executes.
    let made: &[Row<'_>] = &[("<string>:3 __init__", Generated), ("/home/me/train.py:9 f", User)];
    let spawned: &[Row<'_>] = &[
        ("<string>:3 __init__", Generated),
        ("/home/me/train.py:9 f", User),
        ("/usr/lib/python3.11/multiprocessing/spawn.py:122 spawn_main", Standard),
        ("<string>:1 <module>", Generated),
    ];
    let package = "/env/lib/python3.11/site-packages/acme/x.py:9 f";
    let by_package: &[Row<'_>] = &[("<string>:1 <module>", User), (package, Installed)];
    right(&NONE, &[made, spawned, by_package]);
    // Of a stack that is in no table.
    let frames = [frame("<string>", "__init__", 3), frame("<string>", "<module>", 9)];
    assert_eq!(Places::default().stack(&[&frames[0], &frames[1]]), [User, User]);
}

#[test]
fn a_frozen_module_is_whose_its_name_says() {
    all(User, &["<frozen acme.train>", "<frozen train>", "<frozen torchy>"]);
    all(
        Standard,
        &["<frozen runpy>", "<frozen getpath>", "<frozen importlib._bootstrap_external>"],
    );
    all(PyTorch, &["<frozen torch.nn.modules.linear>"]);
}

#[test]
fn a_script_may_be_called_as_a_library_or_an_interpreter_is() {
    let library = "/v/lib/x.so";
    let about = json!({"python": {}, "libraries": {library: ""}});
    let native = format!("{library}:70000 at::empty()");
    for script in
        ["job.s", "job.c", "job.h", "job.a", "job.o", "job", "python_train", "pythonic", "pypy_run"]
    {
        let frame = |function: &str| format!("/home/me/{script}:9000 {function}");
        let (inner, outer) = (frame("main"), frame("<module>"));
        // Of a process whose libraries are all known: a thread has no module.
        right(&about, &[&[(&native, Native), (&inner, User)]]);
        right(&NONE, &[&[(&native, Native), (&inner, User), (&outer, User)]]);
    }
    for script in ["python_train", "pythonic", "pypy_run"] {
        let line = format!("/home/me/bin/{script}:9 main");
        right(&NONE, &[&[(&line, User)]]);
    }
    for interpreter in
        ["python", "python3", "python3.13t", "python3.11d", "python3.11-dbg", "pypy3.10"]
    {
        let line = format!("/usr/bin/{interpreter}:9 Py_BytesMain");
        right(&NONE, &[&[(&line, Native)]]);
    }
    // Native frames with their source files, and a library that no list names.
    right(
        &about,
        &[&[
            ("/src/aten/Empty.cpp:9 at::empty(long)", Native),
            ("/src/engine.c:9 run", Native),
            ("/usr/include/c++/12/functional:9 std::invoke", Native),
            ("/home/me/train:9 <module>", User),
            ("/lib/libother.so.1:9 f", Native),
        ]],
    );
    // A program in C alone has no names that say so.
    let c = json!({"python": {}, "libraries": {library: ""}, "symbolized": true});
    right(&c, &[&[("/src/engine.c:9 run", Native), ("/home/me/train:9 main", User)]]);
    let no_python = json!({"python": {"pytorch": [], "standard": []}, "libraries": {}});
    right(&no_python, &[&[("/src/engine.c:9 run", Native)]]);
    right(
        &about,
        &[&[
            ("/lib/libother.so.1:9 f", Native),
            ("memtrace:0 [cut (deep)]", Gap),
            ("/home/me/job.c:9 f", User),
        ]],
    );
}

#[test]
fn a_line_that_is_not_known_is_no_offset() {
    right(&NONE, &[&[("/home/me/bin/train:-1 main", User)]]);
}
