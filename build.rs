//! Link flags of the preloaded library.

fn main() {
    // Hooks may be running in any thread at any time: the code must never be unmapped.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
