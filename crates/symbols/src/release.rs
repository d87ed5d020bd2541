//! Which release of PyTorch a process runs: beside its libraries is the file that says so. Which
//! settings it knows, and how it reads them, depends on that.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// The release, such as `2.11.0+cu130`, by the libraries that the process has loaded.
pub fn of_libraries<'a>(mut paths: impl Iterator<Item = &'a str>) -> Option<String> {
    const MOST: u64 = 1 << 16;
    let library = Path::new(paths.find(|path| path.ends_with("/torch/lib/libc10.so"))?);
    let says = library.parent()?.parent()?.join("version.py");
    // The name may come from an untrusted file: a pipe must not be waited for.
    fs::metadata(&says).ok().filter(fs::Metadata::is_file)?;
    let mut text = String::new();
    File::open(&says).ok()?.take(MOST).read_to_string(&mut text).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
    let release = line.trim().trim_matches(['\'', '"']);
    let is_plain = release.chars().all(|c| c.is_ascii_alphanumeric() || ".+-_".contains(c));
    (is_plain && release.len() <= 64).then(|| release.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_beside_the_libraries_says_it() {
        let folder = tempfile::tempdir().expect("made");
        let torch = folder.path().join("torch");
        fs::create_dir_all(torch.join("lib")).expect("made");
        let library = torch.join("lib/libc10.so");
        let of = || of_libraries(["/usr/lib/libc.so.6", library.to_str()?].into_iter());
        assert_eq!(of(), None);
        let text = "from typing import Optional\n\n__version__ = '2.6.0+cu124'\ndebug = False\n";
        fs::write(torch.join("version.py"), text).expect("written");
        assert_eq!(of().as_deref(), Some("2.6.0+cu124"));
        fs::write(torch.join("version.py"), "__version__ = '\x1b[2J'\n").expect("written");
        assert_eq!(of(), None);
    }
}
