//! Stand-ins for NVIDIA's libraries, so that a program runs on the virtual GPU and on nothing else.
//!
//! The virtual GPU is one library. It calls itself `libcuda.so.1` and defines every function of
//! every vendor library. A program, though, asks for those libraries by their own names. And
//! whoever looks a function up in a particular library must find it there, as PyTorch does with
//! NVRTC. So each name gets a shared object that is empty but for that name and a dependency on
//! `libcuda.so.1`. All are preloaded. The loader then takes the vendor's libraries for loaded and
//! never maps them. A look-up goes through the dependency to the virtual GPU. The vendor's
//! packages need not even be installed.
//!
//! NVIDIA's libraries give their symbols a version, which is called as the library is. A library
//! that was linked to one asks for it, and the loader complains when it is missing. So a
//! stand-in has it, too, though no symbol.
//!
//! A user's machine has no compiler, so the objects are written here, byte by byte;
//! each is about 700 bytes. They live in a private folder that is made once for a
//! build of the virtual GPU and used again.

use std::fs::{self, DirBuilder};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use memtrace_devices::Toolkit;
use memtrace_files::{NewFile, Readers};
use object::write::elf::{Encoder, FileHeader, FileHeaderLayout, ProgramHeader, Verdef};
use object::{Endianness, elf};

/// The name under which the virtual GPU is loaded, and which every stand-in depends on.
pub const DRIVER: &str = "libcuda.so.1";

/// The names that a linker's file would have; nothing is loaded under it but by `dlopen`.
const DRIVER_UNVERSIONED: &str = "libcuda.so";

/// Vendor libraries that have a stand-in, beside those that come with each toolkit.
const LIBRARIES: &[&str] = &[
    "libcudnn.so.9",
    "libcudnn_adv.so.9",
    "libcudnn_cnn.so.9",
    "libcudnn_ops.so.9",
    "libcudnn_graph.so.9",
    "libcudnn_heuristic.so.9",
    "libcudnn_engines_precompiled.so.9",
    "libcudnn_engines_runtime_compiled.so.9",
    "libcudnn_engines_tensor_ir.so.9",
    "libcudnn_ext.so.9",
    "libcurand.so.10",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libcufile.so.0",
    "libnvshmem_host.so.3",
    "libnvidia-ml.so.1",
];

/// The names of all stand-ins, those for each toolkit first.
pub fn names() -> impl Iterator<Item = &'static str> {
    let of_toolkits = Toolkit::ALL.into_iter().flat_map(Toolkit::libraries);
    of_toolkits.chain(LIBRARIES).copied()
}

/// Libraries whose symbols have no version.
const UNVERSIONED: &[&str] = &["libnccl.so.2", "libcufile.so.0", "libcusparseLt.so.0"];
/// A version beside the one that is called as the library is.
const NVSHMEM: (&str, &str) = ("libnvshmem_host.so.3", "NVSHMEM");

#[cfg(target_arch = "x86_64")]
const MACHINE: elf::Machine = elf::EM_X86_64;
#[cfg(target_arch = "aarch64")]
const MACHINE: elf::Machine = elf::EM_AARCH64;

/// The largest page of the machines we build for; a segment boundary keeps to it.
const PAGE: u64 = 64 << 10;

/// A folder of stand-ins, complete.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Makes the folder for a build of the virtual GPU, or finds it made.
    /// `library` is an absolute path.
    ///
    /// # Errors
    /// If the folder can't be made, or belongs to somebody else. The message is for the user.
    pub fn ready(library: &Path) -> Result<Folder, String> {
        let base = base().map_err(|e| format!("cannot tell who I am: {e}"))?;
        Folder::ready_below(&base, library)
    }

    /// The same in a given place.
    ///
    /// # Errors
    /// As [`Folder::ready`].
    pub fn ready_below(base: &Path, library: &Path) -> Result<Folder, String> {
        let name = name(library).map_err(|e| format!("cannot read {}: {e}", library.display()))?;
        let path = base.join(name);
        private(&path)?;
        let folder = Folder { path };
        folder.fill(library).map_err(|e| {
            format!(
                "cannot write the virtual GPU's libraries into {}: {e}; set TMPDIR to a folder that can be written",
                folder.path.display()
            )
        })?;
        Ok(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What goes into `LD_PRELOAD`, the virtual GPU first.
    pub fn libraries(&self) -> impl Iterator<Item = PathBuf> {
        [DRIVER].into_iter().chain(names()).map(|name| self.path.join(name))
    }

    /// Each file appears complete under its name or not at all, so two runs may fill one
    /// folder at once. A file that a cleaner of temporary folders took away comes back. What
    /// is there and is something else is removed.
    fn fill(&self, library: &Path) -> io::Result<()> {
        for (name, target) in [(DRIVER, library), (DRIVER_UNVERSIONED, Path::new(DRIVER))] {
            if fs::read_link(self.path.join(name)).ok().as_deref() != Some(target) {
                self.link(name, target)?;
            }
        }
        for name in names() {
            let path = self.path.join(name);
            let found = fs::symlink_metadata(&path);
            if found.as_ref().is_ok_and(fs::Metadata::is_file) {
                continue;
            }
            memtrace_files::clear_abandoned(&self.path);
            let new = NewFile::within(&self.path, Readers::Owner)?;
            new.file().write_all(&shared_object(name, DRIVER))?;
            if found.is_ok_and(|found| !found.is_dir()) {
                let _ = fs::remove_file(&path); // another run may have been faster
            }
            new.replace(&path)?;
        }
        Ok(())
    }

    fn link(&self, name: &str, target: &Path) -> io::Result<()> {
        let beside = self.path.join(format!(".{name}.{}", std::process::id()));
        // Left by a process of this number that was killed right here.
        let _ = fs::remove_file(&beside);
        symlink(target, &beside)?;
        fs::rename(&beside, self.path.join(name))
    }
}

/// A user's own place for files of a session; the temporary folder where there is none.
fn base() -> io::Result<PathBuf> {
    let me = uid()?;
    let session = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let mine = |p: &PathBuf| fs::metadata(p).is_ok_and(|m| m.is_dir() && m.uid() == me);
    let temporary = std::path::absolute(std::env::temp_dir())?;
    Ok(session.filter(|p| p.is_absolute() && mine(p)).unwrap_or(temporary))
}

/// Who we are. A process's own entry belongs to its effective user.
pub(crate) fn uid() -> io::Result<u32> {
    fs::metadata("/proc/self").map(|m| m.uid())
}

/// Another build of the library, or another release of this list, is another folder.
fn name(library: &Path) -> io::Result<String> {
    let file = fs::metadata(library)?;
    let mut hash = DefaultHasher::new();
    (library, file.mtime(), file.mtime_nsec(), file.size()).hash(&mut hash);
    names().for_each(|name| name.hash(&mut hash));
    (env!("CARGO_PKG_VERSION"), shared_object(NVSHMEM.0, DRIVER)).hash(&mut hash);
    Ok(format!("memtrace-{}-{:016x}", uid()?, hash.finish()))
}

/// Makes a folder that only we can change, or checks that the one there is.
fn private(path: &Path) -> Result<(), String> {
    let made = DirBuilder::new().mode(0o700).create(path);
    if let Err(e) = made
        && e.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(format!(
            "cannot make the folder {}: {e}; set TMPDIR to a folder that can be written",
            path.display()
        ));
    }
    // Not through a link: somebody else's link could lead anywhere.
    let found = fs::symlink_metadata(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let me = uid().map_err(|e| format!("cannot tell who I am: {e}"))?;
    if !found.is_dir() || found.uid() != me || found.mode() & 0o077 != 0 {
        return Err(format!(
            "{} is not a folder that only you can change: remove it, or set TMPDIR to a folder of your own",
            path.display()
        ));
    }
    Ok(())
}

/// The versions that a stand-in defines; the first is that of the library as a whole.
fn versions(soname: &str) -> Vec<&str> {
    if UNVERSIONED.contains(&soname) {
        return Vec::new();
    }
    let mut versions = vec![soname, soname];
    versions.extend((soname == NVSHMEM.0).then_some(NVSHMEM.1));
    versions
}

/// A shared object that has a name and needs one other, and versions, and nothing
/// else: no symbols, no code, no sections.
///
/// Two parts are mapped. One is read-only: headers, an empty table of symbols, names. The other is
/// writable: the dynamic section, in which older loaders adjust addresses. All is in one body:
/// where a part is follows from the parts before it, and what is written below must match.
fn shared_object(soname: &str, needed: &str) -> Vec<u8> {
    const PARTS: u32 = 4;
    let elf = Encoder::new(Endianness::Little, true, MACHINE);
    // Where everything is; addresses are offsets, in the second part a page further on.
    let hash = elf.file_header_size() + u64::from(PARTS) * elf.program_header_size();
    let symbols = hash + elf.hash_size(1, 1);
    let names = symbols + elf.sym_size();
    let mut strings = vec![0];
    let mut string = |text: &str| {
        let at = strings.len() as u64;
        strings.extend(text.as_bytes());
        strings.push(0);
        at
    };
    let (own_name, other) = (string(soname), string(needed));
    let versions = versions(soname);
    let version_names: Vec<_> = versions.iter().map(|v| string(v)).collect();
    let names_size = strings.len() as u64;
    let numbers = (names + names_size).next_multiple_of(8);
    let defined = numbers + elf.gnu_versym_size(1).next_multiple_of(8);
    let definitions = elf.gnu_verdef_size(versions.len() as u16, versions.len());
    let dynamic = (defined + definitions).next_multiple_of(8);
    let mut entries = vec![
        (elf::DT_NEEDED, other),
        (elf::DT_SONAME, own_name),
        (elf::DT_HASH, hash),
        (elf::DT_STRTAB, names),
        (elf::DT_SYMTAB, symbols),
        (elf::DT_STRSZ, names_size),
        (elf::DT_SYMENT, elf.sym_size()),
    ];
    if !versions.is_empty() {
        entries.extend([
            (elf::DT_VERSYM, numbers),
            (elf::DT_VERDEF, defined),
            (elf::DT_VERDEFNUM, versions.len() as u64),
        ]);
    }
    entries.push((elf::DT_NULL, 0));
    let part = |kind, flags, offset, address, size, align| ProgramHeader {
        p_type: kind,
        p_flags: flags,
        p_offset: offset,
        p_vaddr: address,
        p_paddr: address,
        p_filesz: size,
        p_memsz: size,
        p_align: align,
    };
    let read_write = elf::PF_R | elf::PF_W;
    let (at, size) = (dynamic + PAGE, entries.len() as u64 * elf.dyn_size());
    let parts: [_; PARTS as usize] = [
        part(elf::PT_LOAD, elf::PF_R, 0, 0, dynamic, PAGE),
        part(elf::PT_LOAD, read_write, dynamic, at, size, PAGE),
        part(elf::PT_DYNAMIC, read_write, dynamic, at, size, 8),
        part(elf::PT_GNU_STACK, read_write, 0, 0, 0, 16),
    ];
    let header = FileHeader {
        os_abi: elf::ELFOSABI_NONE,
        abi_version: 0,
        e_type: elf::ET_DYN,
        e_machine: MACHINE,
        e_entry: 0,
        e_flags: elf::FileFlags(0),
    };
    let layout = FileHeaderLayout {
        e_phoff: elf.file_header_size(),
        segment_num: PARTS,
        e_shoff: 0,
        section_num: 0,
        shstrtab_index: 0,
    };

    let mut bytes = Vec::new();
    elf.file_header(&mut bytes, &header, &layout)
        .expect("four parts and no sections are not too many");
    for part in &parts {
        elf.program_header(&mut bytes, part);
    }
    elf.hash_table(&mut bytes, 1, 1, |_| None);
    elf.null_symbol(&mut bytes);
    bytes.extend(strings);
    bytes.resize(defined as usize, 0);
    for (i, (version, name)) in versions.iter().zip(&version_names).enumerate() {
        let definition = Verdef {
            version: elf::VER_DEF_CURRENT,
            flags: if i == 0 { elf::VER_FLG_BASE } else { elf::VersionFlags(0) },
            index: elf::VersionIndex(i as u16 + 1),
            aux_count: 1,
            name: *name as u32,
            hash: elf::hash(version.as_bytes()),
        };
        elf.gnu_verdef(&mut bytes, i + 1 < versions.len(), &definition);
    }
    bytes.resize(dynamic as usize, 0);
    for (tag, value) in entries {
        elf.dynamic(&mut bytes, tag, value).expect("values fit 64 bits");
    }
    bytes
}
