//! One gzip member after the other, and the zeros with which tapes and block devices pad the end.

use std::io::{self, Read};

use flate2::bufread::GzDecoder;

/// What is in the members.
pub(crate) struct Members<'a>(GzDecoder<&'a [u8]>);

impl<'a> Members<'a> {
    pub(crate) fn new(packed: &'a [u8]) -> Members<'a> {
        Members(GzDecoder::new(packed))
    }
}

impl Read for Members<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let got = self.0.read(into)?;
            let rest: &[u8] = self.0.get_ref();
            if got > 0 || into.is_empty() || rest.iter().all(|b| *b == 0) {
                return Ok(got);
            }
            self.0 = GzDecoder::new(rest);
        }
    }
}
