use super::*;

/// What `work` comes to in each of `size` processes that are connected, in the order of ranks. Here they are threads, and
/// what goes through their sockets is the same.
pub(crate) fn together<T: Send>(size: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let (first, others): (Vec<UnixStream>, Vec<UnixStream>) =
        (1..size).map(|_| UnixStream::pair().expect("sockets can be made")).unzip();
    std::thread::scope(|scope| {
        let work = &work;
        let members: Vec<_> = others
            .into_iter()
            .zip(1..)
            .map(|(socket, rank)| scope.spawn(move || work(Group::member(rank, size, socket))))
            .collect();
        let mut all = vec![work(Group::first(first))];
        all.extend(members.into_iter().map(|member| member.join().expect("a process does not panic")));
        all
    })
}

#[test]
fn everybody_gets_what_everybody_gave_in_the_order_of_ranks() {
    for size in 1..=4 {
        let gathered = together(size, |group| {
            let own = vec![group.rank() as u8; group.rank()];
            let first = group.from_first(&[7 + group.rank() as u8]).unwrap();
            (group.gather(&own).unwrap(), first, group.totals(&[1.0, group.rank() as f64]).unwrap())
        });
        let expected: Vec<Vec<u8>> = (0..size).map(|rank| vec![rank as u8; rank]).collect();
        let ranks = (size * (size - 1) / 2) as f64;
        for all in gathered {
            assert_eq!(all, (expected.clone(), vec![7], vec![size as f64, ranks]));
        }
    }
}

#[test]
fn a_sum_is_of_all_and_has_the_same_bits_everywhere() {
    // More than one chunk, and values whose sum depends on the order of additions.
    let length = CHUNK + 5;
    let part = |rank: usize| Tensor::arange(length, (Kind::Float, Device::Cpu)).sin() * 10f64.powi(rank as i32);
    let sums = together(3, |group| {
        let tensor = part(group.rank());
        // Later ones don't come first.
        std::thread::sleep(std::time::Duration::from_millis(20 * (3 - group.rank() as u64)));
        group.sum(&tensor).unwrap();
        Vec::<f32>::try_from(tensor).unwrap()
    });
    let expected = Vec::<f32>::try_from(part(0) + part(1) + part(2)).unwrap();
    assert!(sums.iter().all(|sum| *sum == expected));
    let alone = part(1);
    Group::alone().sum(&alone).unwrap();
    assert!(alone.equal(&part(1)));
}

#[test]
fn a_process_that_ends_or_does_something_else_is_named() {
    let errors = together(3, |group| match group.rank() {
        0 => Some((group.gather(b"all").unwrap_err().message, group.lost())),
        1 => None,
        _ => Some((group.gather(b"all").unwrap_err().message, group.lost())),
    });
    assert_eq!(errors[0], Some(("process 2 has ended".into(), Some(1))));
    assert_eq!(errors[2], Some(("process 1 has ended".into(), Some(0))));
    let errors = together(2, |group| match group.is_first() {
        true => group.gather(b"all").unwrap_err().message,
        false => group.sum(&Tensor::zeros([3], (Kind::Float, Device::Cpu))).unwrap_err().message,
    });
    assert_eq!(errors, ["process 2 is at another point of its work than this one", "process 1 has ended"]);
}

#[test]
fn weights_that_differ_are_an_error_of_all() {
    let errors = together(3, |group| {
        group.check_equal("the weights", 5).unwrap();
        group.check_equal("the weights", if group.rank() == 2 { 6 } else { 5 }).unwrap_err().message
    });
    assert_eq!(errors, ["the weights of process 3 of 3 are not those of the first one"; 3]);
}
