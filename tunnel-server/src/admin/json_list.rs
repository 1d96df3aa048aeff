//! A JSON list in chunks, one for each batch of what it is made from.

use std::io;

use bytes::Bytes;
use serde::Serialize;

/// The chunks of a list.
pub(crate) struct JsonList<P> {
    batches: P,
    /// What comes before the next element. `None` after the end of the list.
    before: Option<&'static [u8]>,
}

impl<P> JsonList<P> {
    pub(crate) fn new(batches: P) -> Self {
        Self {
            batches,
            before: Some(BEGIN),
        }
    }
}

impl<T: Serialize, P: Iterator<Item = Vec<T>>> Iterator for JsonList<P> {
    type Item = io::Result<Bytes>;

    fn next(&mut self) -> Option<io::Result<Bytes>> {
        let before = self.before?;
        for batch in self.batches.by_ref() {
            let list = match serde_json::to_vec(&batch) {
                Ok(list) => list,
                Err(error) => return Some(Err(error.into())),
            };
            let elements = list.strip_prefix(b"[");
            let elements = elements.and_then(|list| list.strip_suffix(b"]"));
            if let Some(elements) = elements.filter(|elements| !elements.is_empty()) {
                self.before = Some(b",");
                return Some(Ok([before, elements].concat().into()));
            }
        }
        self.before = None;
        Some(Ok(if before == BEGIN { "[]\n" } else { "]\n" }.into()))
    }
}

const BEGIN: &[u8] = b"[";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_one_list() {
        let text = |batches: &[&[u8]]| {
            let batches = batches.iter().map(|batch| batch.to_vec());
            let chunks = JsonList::new(batches);
            let bytes: Vec<_> = chunks.map(Result::unwrap).collect();
            String::from_utf8(bytes.concat()).unwrap()
        };
        assert_eq!(text(&[]), "[]\n");
        assert_eq!(text(&[&[], &[]]), "[]\n");
        assert_eq!(text(&[&[1]]), "[1]\n");
        assert_eq!(text(&[&[], &[1, 2], &[], &[3]]), "[1,2,3]\n");
    }
}
