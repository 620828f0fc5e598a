from server.server_rig import World, config, fleet


def test_a_run_ends_with_every_device_folded_and_deployed(tmp_path):
    world = World(tmp_path, config(), fleet())
    world.run()
    result = world.server.result()
    assert result.finished
    assert [record.round for record in result.rounds] == [1, 2]
    assert all(row.status == "folded" for record in result.rounds for row in record.clients)
    assert {model.client_id: model.status for model in result.deployed} == dict.fromkeys(world.devices, "deployed")
