import mcbn
from trained import centres

net, train_loader, images, truth = centres()  # a network that gives a dict

bayes = mcbn.MCBN(net, "regression", output="centre").fit(train_loader, n_samples=50)
pred = bayes.predict(images)

for i in range(3):
    (x, y), (dx, dy) = pred.mean[i].tolist(), pred.epistemic[i].sqrt().tolist()
    print(f"centre ({x:4.1f} ± {dx:.1f}, {y:4.1f} ± {dy:.1f}), true ({truth[i, 0]:.0f}, {truth[i, 1]:.0f})")
