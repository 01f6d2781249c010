//! What the tests of shared stores stand on: servers, and faults between them and their clients.

use crate::support::s3::S3Server;

#[test]
fn seaweedfs_refuses_a_second_creation() {
    let bucket = S3Server::seaweed().bucket();
    assert!(bucket.create("a/b", "first"));
    assert!(!bucket.create("a/b", "second"));
    assert_eq!(bucket.get("a/b").unwrap(), "first");
    bucket.put("a/b", "third");
    assert_eq!(bucket.get("a/b").unwrap(), "third");
    assert_eq!(bucket.list("a"), ["a/b"]);
    bucket.delete("a/b");
    assert_eq!((bucket.get("a/b"), bucket.list("")), (None, Vec::new()));
}

/// Why a store asks a server for this before it trusts it.
#[test]
fn rclone_does_not() {
    let server = S3Server::rclone();
    let bucket = server.bucket();
    assert!(bucket.create("a/b", "first"));
    assert!(bucket.create("a/b", "second"));
    assert_eq!(bucket.get("a/b").unwrap(), "second");
}
