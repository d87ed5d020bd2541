//! Snapshots from the disk, gzipped or not.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use crate::failure::Failure;

const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The bytes of a snapshot file; `-` is standard input.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let fail = |e: &io::Error| Failure::new(format!("cannot read {}: {e}", path.display()));
    let mut bytes = Vec::new();
    if path.as_os_str() == "-" {
        io::stdin().lock().read_to_end(&mut bytes).map_err(|e| fail(&e))?;
    } else {
        File::open(path).and_then(|mut f| f.read_to_end(&mut bytes)).map_err(|e| fail(&e))?;
    }
    if bytes.starts_with(&GZIP) {
        let mut unpacked = Vec::new();
        MultiGzDecoder::new(&bytes[..])
            .read_to_end(&mut unpacked)
            .map_err(|e| Failure::new(format!("{}: damaged gzip file: {e}", path.display())))?;
        return Ok(unpacked);
    }
    Ok(bytes)
}
