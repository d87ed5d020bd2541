//! Streams, capture and graphs, as programs use them.
