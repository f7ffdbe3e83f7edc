//! What each launcher's variables say, as exact tables.

use std::collections::BTreeMap;

use learner::collectives::launch::{Flags, Found, Launch, Launcher, describe};
use learner::wire::Token;

fn variables(text: &str) -> BTreeMap<String, String> {
    let pair = |line: &str| {
        let (name, value) = line.trim().split_once('=').expect("NAME=VALUE");
        (name.to_owned(), value.to_owned())
    };
    text.lines().filter(|line| !line.trim().is_empty()).map(pair).collect()
}

fn told(text: &str) -> Launch {
    describe(&Flags::default(), &variables(text)).expect("a launch")
}

fn refused(flags: Flags, text: &str) -> String {
    describe(&flags, &variables(text)).expect_err("refused").to_string()
}

fn found<T>(value: T, from: &str) -> Found<T> {
    Found { value, from: from.into() }
}

const SLURM: &str = "
    SLURM_JOB_ID=4711
    SLURM_JOB_NUM_NODES=16
    SLURM_JOB_NODELIST=gpu[005-020]
    SLURM_STEP_NUM_NODES=16
    SLURM_STEP_NUM_TASKS=16
    SLURM_STEP_NODELIST=gpu[005-020]
    SLURM_NODEID=3
    SLURM_PROCID=3
    SLURM_GPUS_ON_NODE=8";

#[test]
fn slurm() {
    let launch = told(SLURM);
    let expected = Launch {
        launcher: Launcher::Slurm,
        nodes: found(16, "SLURM_STEP_NUM_NODES"),
        node_rank: found(3, "SLURM_NODEID"),
        coordinator: Some(found("gpu005:29600".into(), "first host of SLURM_STEP_NODELIST, default port")),
        gpus_per_node: Some(found(8, "SLURM_GPUS_ON_NODE")),
        run_id: Some(found("4711".into(), "SLURM_JOB_ID")),
        token: None,
    };
    assert_eq!(launch, expected);
    assert_eq!((launch.world_size(8), launch.rank(2, 8)), (128, 26));

    let typed = told(&SLURM.replace("SLURM_GPUS_ON_NODE=8", "SLURM_GPUS_PER_NODE=h100:4"));
    assert_eq!(typed.gpus_per_node, Some(found(4, "SLURM_GPUS_PER_NODE")));
    let line = refused(Flags::default(), &SLURM.replace("SLURM_GPUS_ON_NODE=8", "SLURM_GPUS_PER_NODE=h100:"));
    assert_eq!(line, "SLURM_GPUS_PER_NODE=\"h100:\": a number of GPUs is expected");
    let line = refused(Flags::default(), &SLURM.replace("STEP_NUM_TASKS=16", "STEP_NUM_TASKS=128"));
    assert!(line.starts_with("Slurm starts 8 processes on a node: start one per node (srun --ntasks-per-node=1)"), "{line}");
    let one_node = "SLURM_JOB_ID=1\nSLURM_STEP_NUM_NODES=1\nSLURM_STEP_NUM_TASKS=8\nSLURM_NODEID=0";
    assert!(refused(Flags::default(), one_node).starts_with("Slurm starts 8 processes on a node"));
    let line = refused(Flags::default(), &SLURM.replace("SLURM_NODEID=3", "SLURM_NODEID=16"));
    assert_eq!(line, "node rank 16 (SLURM_NODEID) of 16 nodes (SLURM_STEP_NUM_NODES): ranks count from 0");
    let line = refused(Flags::default(), &SLURM.replace("STEP_NODELIST=gpu[005-020]", "STEP_NODELIST=gpu[005"));
    assert_eq!(line, "SLURM_STEP_NODELIST=\"gpu[005\": a list of hosts is expected");
}

#[test]
fn slurm_outside_of_a_step() {
    let batch = "SLURM_JOB_ID=4711\nSLURM_NNODES=2\nSLURM_JOB_NODELIST=a,b\nSLURM_NODEID=0\nSLURM_PROCID=0";
    let line = refused(Flags::default(), batch);
    assert_eq!(
        line,
        "2 nodes (SLURM_NNODES), but nothing says which of them this one is: start it with srun, or give --nodes 1 to use this node alone"
    );
    let alone = describe(&Flags { nodes: Some(1), ..Flags::default() }, &variables(batch)).expect("this node alone");
    assert_eq!((alone.nodes, alone.node_rank, alone.coordinator), (found(1, "--nodes"), found(0, "the only node"), None));
    assert_eq!(told("SLURM_JOB_ID=4711\nSLURM_NNODES=1").nodes, found(1, "SLURM_NNODES"));
}

const TORCHRUN: &str = "
    RANK=1
    LOCAL_RANK=0
    WORLD_SIZE=2
    LOCAL_WORLD_SIZE=1
    GROUP_RANK=1
    GROUP_WORLD_SIZE=2
    MASTER_ADDR=10.0.0.7
    MASTER_PORT=29500
    TORCHELASTIC_RUN_ID=job-7";

#[test]
fn torchrun() {
    let expected = Launch {
        launcher: Launcher::Torchrun,
        nodes: found(2, "GROUP_WORLD_SIZE"),
        node_rank: found(1, "GROUP_RANK"),
        coordinator: Some(found("10.0.0.7:29600".into(), "MASTER_ADDR, default port")),
        gpus_per_node: None,
        run_id: Some(found("job-7".into(), "TORCHELASTIC_RUN_ID")),
        token: None,
    };
    assert_eq!(told(TORCHRUN), expected);
    // Under Slurm it is still torchrun that started this process.
    assert_eq!(told(&format!("{SLURM}{TORCHRUN}")), expected);
    assert_eq!(told(&TORCHRUN.replace("job-7", "none")).run_id, None);
    let line = refused(Flags::default(), &TORCHRUN.replace("LOCAL_WORLD_SIZE=1", "LOCAL_WORLD_SIZE=8"));
    assert!(
        line.starts_with("torchrun starts 8 processes on a node: start one per node (torchrun --nproc-per-node 1)"),
        "{line}"
    );
}

const OPEN_MPI: &str = "
    OMPI_COMM_WORLD_RANK=2
    OMPI_COMM_WORLD_SIZE=4
    OMPI_COMM_WORLD_LOCAL_RANK=0
    OMPI_COMM_WORLD_LOCAL_SIZE=1";

#[test]
fn open_mpi() {
    let line = refused(Flags::default(), OPEN_MPI);
    assert!(line.contains("nothing says where rank 0 listens: OpenMPI names no hosts: give --coordinator"), "{line}");
    let expected = Launch {
        launcher: Launcher::OpenMpi,
        nodes: found(4, "OMPI_COMM_WORLD_SIZE"),
        node_rank: found(2, "OMPI_COMM_WORLD_RANK"),
        coordinator: Some(found("head:29600".into(), "MASTER_ADDR, default port")),
        gpus_per_node: None,
        run_id: Some(found("99".into(), "SLURM_JOB_ID")),
        token: None,
    };
    assert_eq!(told(&format!("{OPEN_MPI}\nMASTER_ADDR=head\nSLURM_JOB_ID=99\nSLURM_NNODES=4")), expected);
    let line = refused(
        Flags::default(),
        "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=8\nOMPI_COMM_WORLD_LOCAL_SIZE=8\nMASTER_ADDR=head",
    );
    assert!(line.starts_with("OpenMPI starts 8 processes on a node: start one per node"), "{line}");
    // `mpirun -n 1`, or a build under MPI of a job of one node.
    let alone = told("OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=1\nOMPI_COMM_WORLD_LOCAL_SIZE=1");
    assert_eq!((alone.nodes.value, alone.coordinator), (1, None));
}

#[test]
fn kubernetes() {
    let pod = "JOB_COMPLETION_INDEX=5\nHOSTNAME=train-workers-0-5\nKUBERNETES_SERVICE_HOST=10.96.0.1";
    let line = refused(Flags::default(), pod);
    assert_eq!(line, "Kubernetes says which node this is, but not of how many: give --nodes N or set LEARNER_NODES");
    let line = refused(Flags { nodes: Some(16), ..Flags::default() }, pod);
    assert!(line.ends_with("set LEARNER_COORDINATOR to the stable name of pod 0, of a JobSet NAME-JOB-0-0.NAME"), "{line}");
    let set = "LEARNER_NODES=16\nLEARNER_COORDINATOR=train-workers-0-0.train\nLEARNER_GPUS_PER_NODE=8\nJOBSET_NAME=train";
    let expected = Launch {
        launcher: Launcher::Kubernetes,
        nodes: found(16, "LEARNER_NODES"),
        node_rank: found(5, "JOB_COMPLETION_INDEX"),
        coordinator: Some(found("train-workers-0-0.train:29600".into(), "LEARNER_COORDINATOR, default port")),
        gpus_per_node: Some(found(8, "LEARNER_GPUS_PER_NODE")),
        run_id: Some(found("train".into(), "JOBSET_NAME")),
        token: None,
    };
    assert_eq!(told(&format!("{pod}\n{set}")), expected);
    let pytorch = "WORLD_SIZE=16\nMASTER_ADDR=train-workers-0-0.train\nMASTER_PORT=3389";
    let launch = told(&format!("{pod}\n{pytorch}"));
    assert_eq!(launch.nodes, found(16, "WORLD_SIZE"));
    assert_eq!(launch.coordinator, Some(found("train-workers-0-0.train:3389".into(), "MASTER_ADDR and MASTER_PORT")));
}

#[test]
fn pytorch_variables() {
    let expected = Launch {
        launcher: Launcher::PyTorchVariables,
        nodes: found(2, "WORLD_SIZE"),
        node_rank: found(0, "RANK"),
        coordinator: Some(found("master-0:23456".into(), "MASTER_ADDR and MASTER_PORT")),
        gpus_per_node: None,
        run_id: None,
        token: None,
    };
    assert_eq!(told("RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=master-0\nMASTER_PORT=23456"), expected);
    assert_eq!(
        refused(Flags::default(), "RANK=0\nWORLD_SIZE=two\nMASTER_ADDR=master-0"),
        "WORLD_SIZE=\"two\": a number is expected"
    );
}

#[test]
fn flags_go_before_own_variables_and_those_before_the_launcher() {
    let own = format!(
        "{SLURM}\nLEARNER_NODES=4\nLEARNER_COORDINATOR=other:1234\nLEARNER_TOKEN=hush-hush-hush-hush\nLEARNER_RUN_ID=mine"
    );
    let launch = told(&own);
    assert_eq!(
        (launch.nodes, launch.coordinator),
        (found(4, "LEARNER_NODES"), Some(found("other:1234".into(), "LEARNER_COORDINATOR")))
    );
    assert_eq!(launch.token, Some(found(Token::new("hush-hush-hush-hush").expect("a token"), "LEARNER_TOKEN")));
    assert_eq!(launch.run_id, Some(found("mine".into(), "LEARNER_RUN_ID")));

    let coordinator = Some("[fd00::1]".into());
    let flags = Flags { nodes: Some(2), node_rank: Some(1), coordinator, gpus_per_node: Some(2), port: None };
    let launch = describe(&flags, &variables(&own)).expect("a launch");
    assert_eq!((launch.nodes, launch.node_rank), (found(2, "--nodes"), found(1, "--node-rank")));
    assert_eq!(launch.coordinator, Some(found("[fd00::1]:29600".into(), "--coordinator, default port")));
    assert_eq!(launch.gpus_per_node, Some(found(2, "--gpus-per-node")));
}

#[test]
fn without_a_launcher() {
    let expected = Launch {
        launcher: Launcher::None,
        nodes: found(1, "nothing says otherwise"),
        node_rank: found(0, "the only node"),
        coordinator: None,
        gpus_per_node: None,
        run_id: None,
        token: None,
    };
    assert_eq!(told("HOME=/root\nRANK=3\nLEARNER_NODES="), expected);
    let two = Flags { nodes: Some(2), ..Flags::default() };
    assert!(refused(two.clone(), "").ends_with("give --node-rank R, from 0, on each node"));
    let ranked = Flags { node_rank: Some(0), ..two };
    assert!(refused(ranked, "").ends_with("give --coordinator HOST:PORT, the host of node rank 0"));
    assert_eq!(refused(Flags::default(), "LEARNER_NODES=0"), "LEARNER_NODES=\"0\": at least 1 is expected");
    assert!(
        refused(Flags { node_rank: Some(1), nodes: Some(1), ..Flags::default() }, "").starts_with("node rank 1 (--node-rank)")
    );
}
