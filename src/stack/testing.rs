//! Helpers of the tests.

use std::path::PathBuf;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Epochs are the process's, and tests run side by side.
static EPOCHS: RwLock<()> = RwLock::new(());

/// While this is held, no test begins an epoch.
pub fn steady() -> RwLockReadGuard<'static, ()> {
    EPOCHS.read().unwrap_or_else(PoisonError::into_inner)
}

/// For tests that begin epochs.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    EPOCHS.write().unwrap_or_else(PoisonError::into_inner)
}

/// CPython 3.`minor`: from `MEMTRACE_PYTHON3_<minor>`, the search path, or pyenv.
pub fn python(minor: u8) -> Option<PathBuf> {
    let is_it = |path: &PathBuf| {
        let out = std::process::Command::new(path)
            .args(["-I", "-c", "import sys; print(sys.version_info[:2], sys.implementation.name)"])
            .output();
        out.is_ok_and(|o| {
            String::from_utf8_lossy(&o.stdout).trim() == format!("(3, {minor}) cpython")
        })
    };
    if let Some(named) = std::env::var_os(format!("MEMTRACE_PYTHON3_{minor}")) {
        return Some(PathBuf::from(named)).filter(is_it);
    }
    let name = format!("python3.{minor}");
    let on_path = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|p| std::env::split_paths(&p).map(|d| d.join(&name)).collect::<Vec<_>>());
    let pyenv = std::env::var_os("PYENV_ROOT")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")));
    let versions = pyenv
        .and_then(|root| std::fs::read_dir(root.join("versions")).ok())
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|entry| entry.path().join("bin").join(&name));
    versions.chain(on_path).filter(|p| p.is_file()).find(is_it)
}

/// A large value of zeros, which never lies on the stack.
#[allow(clippy::unnecessary_box_returns)]
pub fn zeroed<T>() -> Box<T>
where
    T: 'static,
{
    // SAFETY: used for types whose all-zero bytes are valid: plain numbers in arrays.
    unsafe { Box::<T>::new_zeroed().assume_init() }
}
